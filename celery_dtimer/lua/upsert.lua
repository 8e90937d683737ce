-- Create timers, or replace their definitions.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] source ("" not static)
-- ARGV[3] with blanks in between: ms that a timer without a run left is kept, entries that the history keeps, how many
--   timers there may be or "-" for any number, and if they are written within a trace its traceparent
-- then per timer, three values:
--   "<id> <new revision> <new status> <due> <jitter> <anew> <given up> <reason>": due is in ms, "+ms" after now, "keep" as
--     stored or "-" none; it is looked at so many ms of jitter later, with "keep:<ms>" only if that is what is stored; anew
--     is 1 for a new creation of what is stored, else 0; given up are runs that have come, "-" or "<why>:<how many>:<from>:<until>:<the second of
--     them, or ->"
--   "<revision> <status>" as they were read, "" for none, "*" for whatever is there
--   definition
-- Returns {now}, and for each timer that is not as it was read its place in the call, from 0, and its hash, empty when
-- there is no timer: then nothing of it was written, but for a definition that is not the one of its revision.
-- Returns the number -4 when there would be too many timers, triggers and pending calls counted: then nothing was written.
-- A due time is later than the timer's last run, whatever was asked for. Runs that are given up are counted if the first of
-- them still is to come; if that one is out, those behind it. If its owner is about to publish it, it is left in_doubt: the
-- owner's next commit of the timer tells what became of it.
-- Worst case: O(instances + timers of the call * log timers).

check_types()
local FIRST, STRIDE = 4, 3 -- the first timer's values, and how many each has
local HEAD = '^(%S+) (%S+) (%S+) (%S+) (%d+) ([01]) (%S+) (.*)$'
local NONE = {}
local now, source = whole(NOW), ARGV[2]
if source ~= '' then
  redis.call('SCARD', key('static_timers', source)) -- its type, before the first write
end
local keep, kept_history, most, trace = string.match(ARGV[3], '^(%d+) (%d+) (%S+) ?(%S*)$')
local choose = placement(candidates())
local timers, queued, owned, definitions = {}, {}, {}, {}

for i = FIRST, #ARGV, STRIDE do
  timers[#timers + 1] = key('timer', string.match(ARGV[i], '^%S+'))
end
local all_new = redis.call('EXISTS', unpack(timers)) == 0  -- as in most calls: then none is read by itself

-- Says whether the timers of the call that are not there yet would be too many.
local function is_full()
  if most == '-' then
    return false
  end
  local room = tonumber(most) - redis.call('ZCARD', QUEUE) - redis.call('ZCARD', INACTIVE)
  if room >= #timers then
    return false -- as in most calls
  end
  for place, timer in ipairs(timers) do
    local is_new = ARGV[FIRST + STRIDE * (place - 1) + 1] == ''
    room = room - (is_new and redis.call('EXISTS', timer) == 0 and 1 or 0)
  end
  return room < 0
end

if is_full() then
  return FULL
end

local function read(timer)
  if all_new then
    return NONE
  end
  local values = fields(timer, 'revision', 'status', 'owner', 'created', 'due', 'at', 'last_run', 'last_sent', 'source',
    'in_doubt')
  if not values[1] then
    return NONE
  end
  return {revision = values[1], status = values[2], owner = values[3], created = values[4], due = values[5],
    at = values[6], last_run = values[7], last_sent = values[8], source = values[9], in_doubt = values[10]}
end

-- The scheduled moment of the next run, and when the timer is looked at for it.
local function moments(row, status, due, jitter, anew)
  if due == '-' then
    return nil
  elseif string.sub(due, 1, 4) == 'keep' then
    local kept = row.due or status == 'active' and now or nil
    if kept and 'keep:' .. kept == due then
      return kept, whole(number(kept, NOW) + jitter)
    end
    return kept, kept and whole(number(row.at, number(kept, NOW)))
  end
  local moment = tonumber(due) + (string.sub(due, 1, 1) == '+' and NOW or 0)
  if row.revision and anew == '0' then
    moment = math.max(moment, number(row.last_run, -1) + 1, number(row.last_sent, -1) + 1)
  end
  return whole(moment), whole(moment + jitter)
end

-- Count the runs that have come and do not happen.
local function give_up(id, row, given_up)
  local reason, runs, first, last, second = string.match(given_up, '^(%a+):(%d+):(%d+):(%d+):(%S+)$')
  if not reason or number(row.due, math.huge) > tonumber(first) then
    return
  end
  local is_out = row.due == first and row.last_sent == first
  if row.due ~= first or (not is_out and not in_flight(id, row.owner)) then
    note_passed(id, reason, runs, first, last)
    return
  end
  if not is_out and row.in_doubt then
    note_passed(id, reason, 1, row.in_doubt, row.in_doubt)
  end
  if tonumber(runs) > 1 then
    note_passed(id, reason, whole(runs - 1), second, last)
  end
  if not is_out then
    redis.call('HSET', key('timer', id), 'in_doubt', first, 'passed', last)
  end
end

-- Put a timer among the static ones of the call's source, and out of those of another.
local function declare(timer, id, row)
  if source ~= '' then
    redis.call('HSET', timer, 'source', source)
    redis.call('SADD', key('static_timers', source), id)
  end
  if row.source and row.source ~= source then
    redis.pcall('SREM', key('static_timers', row.source), id)
    if source == '' then
      redis.call('HDEL', timer, 'source')
    end
  end
end

local function write(timer, row, id, revision, status, due, jitter, anew, given_up, reason)
  local created = now
  if row.revision and anew == '0' then
    created = whole(number(row.created, NOW))
    if row.revision ~= revision then
      redis.call('HSET', timer, 'changed', now)
    end
    if string.sub(due, 1, 4) ~= 'keep' then
      redis.call('HSET', timer, 'armed', now)
    end
  elseif not all_new then
    redis.call('DEL', timer)
  end
  give_up(id, row, given_up)
  local at
  due, at = moments(row, status, due, tonumber(jitter), anew)
  if status == 'active' then
    local owner = still_there(row.owner) or choose()
    redis.call('HSET', timer, 'status', status, 'revision', revision, 'created', created, 'due', due, 'at', at,
      'owner', owner)
    add(queued, at, id)
    give(owned, id, at, owner)
    if row.revision then
      redis.call('HDEL', timer, 'reason')
      redis.call('ZREM', INACTIVE, id)
    end
  else
    redis.call('HSET', timer, 'revision', revision, 'created', created)
    if due then
      redis.call('HSET', timer, 'due', due, 'at', at)
    else
      redis.call('HDEL', timer, 'due', 'at')
    end
    set_aside(id, row.owner, status, reason)
    if status == 'stopped' and reason == 'ended' and source == '' then
      redis.call('ZADD', INACTIVE, whole(NOW + keep), id)
    end
  end
  if trace ~= '' then
    redis.call('HSET', timer, 'trace', trace)
  end
  declare(timer, id, row)
end

-- Says whether a timer is as it was read.
local function is_as_read(row, text)
  return text == (row.revision and row.revision .. ' ' .. (row.status or '') or '') or text == '*' and row.revision
end

-- Write a definition again where something else stands in its place: its revision tells what it is.
local function restore(id, row, revision, definition)
  if row.revision == revision and (row.status == 'active' or row.status == 'paused') then
    local name = key('timer_definition', id)
    local stored = redis.pcall('GET', name)
    if stored ~= definition then
      redis.call('SET', name, definition)
    end
  end
end

local answer = {NOW}
for place, timer in ipairs(timers) do
  local i = FIRST + STRIDE * (place - 1)
  local row = read(timer)
  local id, revision, status, due, jitter, anew, given_up, reason = string.match(ARGV[i], HEAD)
  if is_as_read(row, ARGV[i + 1]) then
    add(definitions, key('timer_definition', id), ARGV[i + 2])
    write(timer, row, id, revision, status, due, jitter, anew, given_up, reason)
  else
    restore(id, row, revision, ARGV[i + 2])
    local found = row.revision and redis.pcall('HGETALL', timer) or NONE
    add(answer, place - 1, found)
  end
end
write_out(definitions, queued, owned)
write_history('', kept_history)
send_wake_ups()
return answer
