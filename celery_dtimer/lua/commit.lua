-- Settle what an instance has done with its due timers: each one only if it is still as it was read.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   ARGV[3] epoch   ARGV[4] sequence number of this call
-- ARGV[5] ms that a finished one-shot is kept   then per timer, one text with blanks in between:
--   id, created, revision, due (as they were read), what was done, and by what was done:
--     run         next due in ms ("-" it has finished), runs skipped, definition that is kept of a finished one
--     refused     ms until it is tried again, "-"
--     lacking     ms until it is tried again, "-"   it needs code that another instance may have
--     broken      "-", "-", reason
--     unreadable  "-", "-", reason   its state could not be read: it is not compared
--     missing     "-", "-"   there was no active timer's hash
-- Returns one code per timer, with blanks in between: 1 settled, 0 owned by another instance, -2 changed, -3 gone,
-- -4 not active; or the number -1 when the epoch is over. A refused run is remembered in its timer as last_sent, if it is the same creation.
-- A call with the number of the last one (its reply was lost) gets that answer and changes nothing.
-- Worst case: O(timers of the call * log timers).

local id, sequence, keep = ARGV[2], ARGV[4], tonumber(ARGV[5])
local instance, own = key('instance', id), key('instance_timers', id)
local live = holds_epoch(id, ARGV[3])
local last = live and fields(instance, 'commit_sequence', 'commit_answer') or {}
if last[1] == sequence then
  return last[2]
end

local function finish(timer, row, due, summary)
  unschedule(timer, id)
  if row.parent or (keep == 0 and not row.source) then
    erase(timer)
    return
  end
  redis.call('HSET', key('timer', timer), 'status', 'stopped', 'reason', 'finished', 'last_run', due,
    'runs', whole(number(row.runs, 0) + 1))
  redis.call('HDEL', key('timer', timer), 'owner', 'attempts', 'last_sent', 'due', 'at')
  redis.call('ZADD', INACTIVE, row.source and '+inf' or whole(NOW + keep), timer)
  redis.call('SET', key('timer_definition', timer), summary)
end

local function advance(timer, row, due, next_due, skipped)
  local at = whole(math.max(tonumber(next_due), tonumber(due) + 1))
  local name = key('timer', timer)
  redis.call('HSET', name, 'due', at, 'at', at, 'last_run', due, 'runs', whole(number(row.runs, 0) + 1))
  if row.last_sent or row.attempts then
    redis.call('HDEL', name, 'last_sent', 'attempts')
  end
  if skipped ~= '0' then
    redis.call('HSET', name, 'skipped', whole(number(row.skipped, 0) + skipped))
  end
  redis.call('ZADD', QUEUE, at, timer)
  redis.call('ZADD', own, at, timer)
end

local function postpone(timer, row, delay)
  local at = whole(NOW + number(delay, 0))
  redis.call('HSET', key('timer', timer), 'at', at, 'attempts', whole(number(row.attempts, 0) + 1))
  redis.call('ZADD', QUEUE, at, timer)
  redis.call('ZADD', own, at, timer)
  return at
end

local others
local function pass_on(timer, row, delay)
  if not others then
    others = {}
    for _, instance in ipairs(candidates()) do
      if instance.id ~= id then
        table.insert(others, instance)
      end
    end
  end
  local at = postpone(timer, row, delay)
  if #others > 0 then
    redis.call('ZREM', own, timer)
    assign(timer, at, placement(others)())
  end
end

local function remember(timer, due, row)
  if tonumber(due) > number(row.last_sent, -1) then
    redis.call('HSET', key('timer', timer), 'last_sent', due)
  end
end

local codes, counts = {}, {run = 0, refused = 0, broken = 0, unreadable = 0, missing = 0, lacking = 0, skipped = 0}
for i = 6, #ARGV do
  local timer, created, revision, due, done, first, second, third =
    string.match(ARGV[i], '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) ?(.*)$')
  local values = fields(key('timer', timer), 'status', 'owner', 'created', 'revision', 'due', 'runs', 'last_sent',
    'attempts', 'parent', 'source', 'skipped')
  local row = {runs = values[6], last_sent = values[7], attempts = values[8], parent = values[9], source = values[10],
    skipped = values[11]}
  local no_timer = done == 'missing' or done == 'unreadable'
  local code
  if not values[1] then
    code = -3
    if live and no_timer then
      bury(timer)
      code = 1
    end
  elseif values[1] ~= 'active' then
    code = -4
    if live and no_timer then
      set_aside(timer, id, values[1], '')
      code = 1
    end
  elseif not live then
    code = 0
  elseif values[2] ~= id then
    code = 0
    redis.call('ZREM', own, timer) -- edited by hand: its hash says whose it is
  elseif done ~= 'unreadable' and (done == 'missing' or values[3] ~= created or values[4] ~= revision or values[5] ~= due) then
    code = -2
  else
    code = 1
    if done == 'run' and first == '-' then
      finish(timer, row, due, third)
    elseif done == 'run' then
      advance(timer, row, due, first, second)
      counts.skipped = counts.skipped + tonumber(second)
    elseif done == 'refused' then
      postpone(timer, row, first)
    elseif done == 'lacking' then
      pass_on(timer, row, first)
    elseif row.parent then
      erase(timer) -- hidden: nobody would ever see or mend it
    else
      set_aside(timer, id, 'broken', third)
    end
  end
  if code ~= 1 and done == 'run' and values[3] == created then
    remember(timer, due, row)
  elseif code == 1 then
    counts[done] = counts[done] + 1
  end
  table.insert(codes, code)
end
if not live then
  return FENCED
end

send_wake_ups()
local answer = table.concat(codes, ' ')
redis.call('HSET', instance, 'commit_sequence', sequence, 'commit_answer', answer)
for name, count in pairs({sent = counts.run, skipped = counts.skipped, refused = counts.refused}) do
  if count > 0 then
    redis.call('HINCRBY', instance, name, count)
  end
end
return answer
