-- Settle what an instance has done with its due timers, each one only if it is still as it was read; then read the next.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   ARGV[3] epoch   ARGV[4] sequence number of this call: 1, 2, … in each epoch. What lacks
--   in between was lost by a failover, and is noted
-- ARGV[5] with blanks in between: ms that a finished timer is kept, entries that the history keeps, 1 when workers note the
--   ends of runs, else 0
-- ARGV[6] how the due timers are read afterwards: see read_due() (prelude.lua); "" not at all
-- ARGV[7] the timers' database   ARGV[8] the broker's, "" when nothing is pushed
-- ARGV[9] a key in the broker's database   ARGV[10] its value: proves that this server is the broker's
-- ARGV[11] number of targets   then per target: command (LPUSH, PUBLISH, PEXPIRE), key
-- then per timer:
--   id
--   creation, revision, due time as they were read, with blanks in between
--   what was done, and the next argument by what was done:
--     run         next due in ms; or, with blanks in between: that or "-" (it has finished), when it is looked at for that,
--                 a reason or "-" when no run was skipped, how many were, from which moment on, until which; and what is
--                 kept of a finished one's definition, "" for all: at once or, when workers note that, from the end of its
--                 last run on
--     skip        the same, when the due run is not sent
--     dead        the same as skip, and after a line feed why: its run is given up and goes to the dead letters
--     refused     ms until it is tried again
--     waits       task ids of its run, with blanks in between: it waits until no other run of the timer is out
--     lacking     ms until it is tried again, blank, schema   it needs code that another instance may have, or one that knows
--                 this schema
--     broken      reason   it goes to the dead letters
--     unreadable  reason   its state could not be read: it is not compared
--     missing     ""   there was no active timer's hash
--   targets of the run's message by their number, with blanks in between, "" when it has been published before
--   one value per target
-- Returns {codes with blanks in between, then lines with the errors of refused pushes; the list of read_due(), or an empty one}.
--   Codes: 1 settled, 0 owned by another instance, -2 changed, -3 gone, -4 not active, -5 its push was refused, -6 not due yet:
--   of the last two nothing of the timer was written.
-- Returns the number -1 when the epoch is over, -3 when the server is not the broker's: then nothing was written, but for
--   a published run of an epoch that is over: like every published run whose commit is refused, it is remembered in its
--   timer as last_sent, if it is the same creation, and counted if the timer goes by another schedule by now.
-- A run that another schedule has left in_doubt, because it might be published just then, is counted as superseded by the next
--   commit that moves its timer on, unless a commit has told meanwhile that it is out.
-- A call with the number of the last one (its reply was lost) gets its codes, and changes nothing.
-- Worst case: O(instances + timers of the call * log timers), and their messages.

check_types()
local call = redis.call
local id, sequence, how = ARGV[2], ARGV[4], ARGV[6]
local keep, kept_history, tracked = string.match(ARGV[5], '^(%d+) (%d+) ([01])$')
keep = tonumber(keep)
local home, database, link, proof = ARGV[7], ARGV[8], ARGV[9], ARGV[10]
local instance, own_timers = key('instance', id), key('instance_timers', id)
local live = holds_epoch(id, ARGV[3])
local last = live and fields(instance, 'commit_sequence', 'commit_answer') or {}
local next_due = function()
  return how ~= '' and read_due(id, how) or {}
end
local lacks_commits = live and number(last[1], 0) < number(sequence, 0) - 1
if last[1] == sequence then
  return {last[2], next_due()}
end

local pushes = live and database ~= ''
local elsewhere = pushes and database ~= home
if pushes and not is_broker(home, database, link, proof) then
  return UNLINKED
end

local targets, position = {}, 12
for n = 1, tonumber(ARGV[11]) do
  targets[n] = {command = ARGV[position], key = ARGV[position + 1]}
  position = position + 2
end

local numbers_of = {['1'] = {1}, [''] = {}}
local function numbers(text)
  local found = numbers_of[text]
  if not found then
    found = {}
    for each in string.gmatch(text, '%d+') do
      found[#found + 1] = tonumber(each)
    end
    numbers_of[text] = found
  end
  return found
end

-- What the server would say against a push, or nil. Redis before 7 does not tell what its user may do.
local function refusal(target, value)
  if redis.acl_check_cmd and not redis.acl_check_cmd(target.command, target.key, value) then
    return 'NOPERM ' .. target.command .. ' ' .. target.key .. ' is not allowed'
  end
  local found = target.command == 'LPUSH' and redis.pcall('TYPE', target.key) or {ok = 'none'}
  if found.ok and found.ok ~= 'none' and found.ok ~= 'list' then
    return 'WRONGTYPE ' .. target.key .. ' is not a list'
  end
  return found.err
end

-- Push a message whose values stand from `from` on; answers an error text, or nil. A message with several pushes goes as
-- a whole or not at all: what could still fail after the first, by the key's type or the user's rights, is looked at before.
local function push(to, from)
  if elsewhere then
    call('SELECT', database)
  end
  local problem
  if #to > 1 then
    for i, number in ipairs(to) do
      problem = problem or refusal(targets[number], ARGV[from + i - 1])
    end
  end
  if not problem then
    for i, number in ipairs(to) do
      local target = targets[number]
      local answer = redis.pcall(target.command, target.key, ARGV[from + i - 1])
      if type(answer) == 'table' and answer.err then
        problem = string.gsub(answer.err, '[\r\n]', ' ')
        break
      end
    end
  end
  if elsewhere then
    call('SELECT', home)
  end
  return problem
end

local function finish(timer, name, row, due, summary, done)
  if is_countdown(timer) then
    erase(timer)
    return
  end
  unschedule(timer, id)
  local more = fields(name, 'parent', 'source')
  if done == 'run' then
    local run = whole(number(row[6], 0) + 1)
    note_sent(more[1] or timer, due, more[1] and (string.find(timer, '^run%d+%-') and 'resent' or 'trigger') or run)
    call('HSET', name, 'last_run', due, 'runs', run)
  end
  if more[1] or (keep == 0 and not more[2]) then
    erase(timer, true)
    return
  end
  call('HSET', name, 'status', 'stopped', 'reason', 'finished')
  call('HDEL', name, 'owner', 'attempts', 'last_sent', 'due', 'at', 'summary')
  call('ZADD', INACTIVE, more[2] and '+inf' or whole(NOW + keep), timer)
  if summary ~= '' and done == 'run' and tracked == '1' then
    call('HSET', name, 'summary', summary)
  elseif summary ~= '' then
    call('SET', key('timer_definition', timer), summary)
  end
end

local rescheduled = {} -- scores and members, for one ZADD each at the end: calls are what a script's time goes into
local counts = {run = 0, skip = 0, dead = 0, waits = 0, refused = 0, broken = 0, unreadable = 0, missing = 0, lacking = 0}
local passed = 0 -- runs that do not happen

local function advance(timer, name, row, due, following, at, done)
  if tonumber(following) <= tonumber(due) then
    following = whole(tonumber(due) + 1)
    at = whole(math.max(tonumber(at), tonumber(following)))
  end
  if done == 'run' then
    local run = whole(number(row[6], 0) + 1)
    note_sent(timer, due, run)
    call('HSET', name, 'due', following, 'at', at, 'last_run', due, 'runs', run)
  else
    call('HSET', name, 'due', following, 'at', at)
  end
  if row[7] or row[8] then
    call('HDEL', name, 'last_sent', 'attempts')
  end
  add(rescheduled, at, timer)
end

-- Keep what is known of a run that is given up; with its definition, if the timer goes, or that is cut.
local function to_dead_letters(timer, name, row, due, reason, problem, goes)
  local parent = fields(name, 'parent')[1]
  local letter = timer .. ':' .. (row[3] or '') .. ':' .. (due or '')
  local definition = (goes or parent or is_countdown(timer)) and redis.pcall('GET', key('timer_definition', timer))
  if type(definition) ~= 'string' then
    definition = ''
  end
  bury_letter(letter, definition, 'timer', parent or timer, 'due', due or '', 'number', whole(number(row[6], 0) + 1),
    'reason', reason, 'error', problem, 'where', id)
end

-- Move a timer on to its next run, and count those that do not happen.
local function move_on(timer, name, row, due, done, detail)
  if row[9] then
    note_skipped(timer, 'superseded', 1, row[9], row[9])
    call('HDEL', name, 'in_doubt')
    passed = passed + 1
  end
  if tonumber(detail) then
    return advance(timer, name, row, due, detail, detail, done)
  end
  local following, at, reason, runs, first, last, summary, problem =
    string.match(detail, '^(%S+) (%S+) (%S+) (%d+) (%d+) (%d+) ?([^\n]*)\n?(.*)$')
  if done == 'dead' then
    to_dead_letters(timer, name, row, due, reason, problem, following == '-')
  end
  if reason ~= '-' then
    passed = passed + tonumber(runs)
    if is_countdown(timer) then
      count('skipped_' .. reason, runs)
    else
      local parent = fields(name, 'parent')[1]
      note_skipped(parent and call('EXISTS', key('timer', parent)) == 1 and parent or timer, reason, runs, first, last)
    end
  end
  if following == '-' then
    finish(timer, name, row, due, summary, done)
  else
    advance(timer, name, row, due, following, at, done)
  end
end

-- Let a timer be looked at later for the run that is due, and note why: how often it was refused, or that it waits.
local function put_off(timer, name, at, attempts)
  call('HSET', name, 'at', at, 'attempts', attempts)
  call('ZADD', QUEUE, at, timer)
  call('ZADD', own_timers, at, timer)
end

local function postpone(timer, name, row, delay)
  local at = whole(NOW + number(delay, 0))
  put_off(timer, name, at, whole(number(row[8], 0) + 1))
  return at
end

-- Let a timer wait for the end of the other runs that are out: of that it is told, or their leases end.
local function wait(timer, name, row, tasks)
  local own = {}
  for task in string.gmatch(tasks, '%S+') do
    own[task] = true
  end
  local _, first = others_out(fields(name, 'parent')[1] or timer, own)
  put_off(timer, name, whole(first == math.huge and NOW or first), 'waits')
end

local others
local UNREAD = 10 -- times as long as asked for a timer is left alone that no instance can read

local function pass_on(timer, name, row, detail)
  local delay, schema = string.match(detail, '^(%d+) (%d+)$')
  delay, schema = tonumber(delay), tonumber(schema)
  if not others then
    others = {}
    for _, each in ipairs(candidates()) do
      if each.id ~= id then
        table.insert(others, each)
      end
    end
  end
  local takers = {}
  for _, each in ipairs(others) do
    if schema == 0 or number(fields(key('instance', each.id), 'schema')[1], 0) >= schema then
      takers[#takers + 1] = each
    end
  end
  local at = postpone(timer, name, row, schema > 0 and #takers == 0 and UNREAD * delay or delay)
  if #takers > 0 then
    call('ZREM', own_timers, timer)
    assign(timer, at, placement(takers)())
  end
end

-- Write what was done with a timer that is as it was read; answers its code, and the error of a refused push.
local function settle(timer, name, row, due, done, detail, to, from)
  if done == 'run' then
    if #to > 0 and row[7] == due then
      return -2 -- somebody has published it meanwhile
    elseif #to > 0 and tonumber(due) > NOW then
      return -6 -- it was told ahead, and the clock has gone back
    end
    local problem = #to > 0 and push(to, from)
    if problem then
      return -5, problem
    end
  end
  if done == 'broken' or done == 'unreadable' then
    to_dead_letters(timer, name, row, due, 'broken', detail)
  end
  if done == 'run' or done == 'skip' or done == 'dead' then
    move_on(timer, name, row, due, done, detail)
  elseif done == 'waits' then
    wait(timer, name, row, detail)
  elseif done == 'refused' then
    postpone(timer, name, row, detail)
  elseif done == 'lacking' then
    pass_on(timer, name, row, detail)
  elseif is_countdown(timer) or fields(name, 'parent')[1] then
    erase(timer) -- hidden: nobody would ever see or mend it
  else
    set_aside(timer, id, 'broken', detail)
  end
  return 1
end

-- Count a run that was published for a timer that goes by another schedule by now: nobody comes upon it any more.
local function count_sending(timer, name, row, due)
  if is_countdown(timer) then
    return -- whoever comes upon it counts it
  end
  local more = fields(name, 'last_run', 'passed', 'parent')
  local in_doubt = row[9] == due
  local counted = math.max(number(more[1], -1), in_doubt and -1 or number(more[2], -1))
  if in_doubt then
    call('HDEL', name, 'in_doubt')
  end
  if number(row[5], 0) > tonumber(due) and tonumber(due) > counted and not more[3] then
    local run = whole(number(row[6], 0) + 1)
    call('HSET', name, 'last_run', due, 'runs', run)
    counts.run = counts.run + 1
    note_sent(timer, due, run)
  end
end

local codes, errors = {}, {}
while position <= #ARGV do
  local timer, read, done, detail = ARGV[position], ARGV[position + 1], ARGV[position + 2], ARGV[position + 3]
  local to, from = numbers(ARGV[position + 4]), position + 5
  position = from + #to
  local name = key('timer', timer)
  local row = fields(name, 'status', 'owner', 'created', 'revision', 'due', 'runs', 'last_sent', 'attempts', 'in_doubt')
  local no_timer = done == 'missing' or done == 'unreadable'
  local code, problem
  if not row[1] then
    code = -3
    if live and no_timer then
      bury(timer)
      code = 1
    end
  elseif row[1] ~= 'active' then
    code = -4
    if live and no_timer then
      set_aside(timer, id, row[1], '')
      code = 1
    end
  elseif not live then
    code = 0
  elseif row[2] ~= id then
    code = 0
    call('ZREM', own_timers, timer) -- edited by hand: its hash says whose it is
  elseif done == 'unreadable' then
    code = settle(timer, name, row, nil, done, detail)
  elseif done == 'missing' or read ~= (row[3] or '') .. ' ' .. (row[4] or '') .. ' ' .. (row[5] or '') then
    code = -2
  else
    code, problem = settle(timer, name, row, row[5], done, detail, to, from)
  end
  if code == 1 then
    counts[done] = counts[done] + 1
  elseif problem then
    errors[#errors + 1] = problem
  elseif done == 'run' and #to == 0 then
    local created, due = string.match(read, '^(%S+) %S+ (%S+)$')
    if row[3] == created and tonumber(due) > number(row[7], -1) then
      call('HSET', name, 'last_sent', due)
      count_sending(timer, name, row, due)
    elseif row[3] ~= created and is_countdown(timer) then
      counts.run = counts.run + 1 -- it was sent, and its task has called itself again
    end
  end
  codes[#codes + 1] = code
end
if counts.run > 0 then
  count('sent', counts.run)
end
write_history(id, kept_history)
if not live then
  return FENCED
end
if #rescheduled > 0 then
  call('ZADD', QUEUE, unpack(rescheduled))
  call('ZADD', own_timers, unpack(rescheduled))
end

send_wake_ups()
table.insert(errors, 1, table.concat(codes, ' '))
local answer = table.concat(errors, '\n')
if lacks_commits then
  note_replay(id, last_known(id), kept_history)
  call('HSET', instance, 'replay_noted', '1')
end
call('HSET', instance, 'commit_sequence', sequence, 'commit_answer', answer, 'committed_at', whole(NOW))
for name, by in pairs({sent = counts.run, skipped = passed, refused = counts.refused}) do
  if by > 0 then
    add_to(instance, name, by)
  end
end
return {answer, next_due()}
