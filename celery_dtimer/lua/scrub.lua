-- Look at up to ARGV[5] timers as they are listed, and at some keys, and put right what was deleted or edited by hand.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   ARGV[3] epoch   ARGV[4] where to go on: "" at the beginning   ARGV[5] limit, 0 for none
-- ARGV[6] ms that a timer without a run left is kept   then per key: what it is, the id in it ("" keys of the service itself are
--   left to mend.lua)
-- Returns {where to go on, "" when all has been looked at; then per repair: what was repaired, its id, what was wrong and what
-- was done}, or -1 when the epoch is over.
-- The lists are timer_queue, inactive_timers, and instance_timers of nobody and of each instance, one after the other: so an
-- active timer is found if any of them has it. What is in none of them is found by the keys that the caller has come upon.
-- A timer's time is what two of queue, owner and hash agree on, else the queue's. One whose owner does not know it, at that
-- time, goes to nobody, from whom the failure check takes it; what its owner may be publishing stays with it.
-- Worst case: O(instances + (limit + keys) * (log timers + runs of the timer that are out, at most 100)); of keys of instances
-- that are not registered, 100 timers each.

local id, limit, keep = ARGV[2], tonumber(ARGV[5]), tonumber(ARGV[6])
if not holds_epoch(id, ARGV[3]) then
  return FENCED
end
check_types()

local MOST = 100 -- runs of a timer, or timers of an instance that is gone, that are looked at
local known = {[UNASSIGNED] = true}
local owners = {UNASSIGNED}
for _, instance in ipairs(redis.call('ZRANGE', INSTANCES, 0, -1)) do
  known[instance] = true
  owners[#owners + 1] = instance
end

local answer = {''}
local function report(what, id, wrong)
  for _, each in ipairs({what, id, wrong}) do
    answer[#answer + 1] = each
  end
end

-- The score of a timer in a list, or nil; also when that is none: nobody looks at lists of instances that are gone.
local function score(list, timer)
  local found = redis.pcall('ZSCORE', list, timer)
  return type(found) == 'string' and found or nil
end

local function moment_of(text)
  local moment = tonumber(text or nil)
  return moment and moment >= 0 and moment <= LAST_MS and moment == math.floor(moment) and whole(moment) or nil
end

-- The time that two of three agree on, else that of the first that has one.
local function agreed(queued, owned, own, due)
  if owned and owned == own then
    return owned
  end
  return queued or owned or own or due
end

-- What is wrong with the runs that a timer waits for: such as nothing is known of any more.
local function forget_runs(timer)
  local open, forgotten = key('open_runs', timer), 0
  local tasks = redis.pcall('ZRANGE', open, 0, MOST - 1)
  for _, task in ipairs(tasks.err and {} or tasks) do
    if not lease_of(task) then
      forgotten = forgotten + redis.call('ZREM', open, task)
    end
  end
  if forgotten > 0 then
    end_waiting(timer)
    return 'it waited for runs that nothing is known of: forgotten'
  end
end

local function look_at_active(timer, row, queued, listed)
  local name, parent = key('timer', timer), row[7]
  local hidden = parent or is_countdown(timer)
  local due = moment_of(row[4])
  if not due or not moment_of(row[3]) then
    if hidden then
      erase(timer)
      return 'its state could not be read: removed'
    end
    set_aside(timer, row[6], 'broken', DAMAGED .. 'its stored state can not be read')
    return 'its state could not be read: set aside as broken'
  end
  local size = redis.pcall('STRLEN', key('timer_definition', timer))
  if not hidden and (type(size) == 'table' or size == 0) then
    set_aside(timer, row[6], 'broken', DAMAGED .. 'its definition is gone')
    return 'its definition was gone: set aside as broken'
  end
  local wrong
  if listed then
    redis.call('ZREM', INACTIVE, timer)
    wrong = 'it was listed as inactive: taken out'
  end
  local owner = row[6] or UNASSIGNED
  local at = moment_of(row[5])
  local owned = score(key('instance_timers', owner), timer)
  if not (at and queued == at and owned == at and row[5] == at and known[owner]) then
    at = agreed(moment_of(queued), moment_of(owned), at, due)
    if not (known[owner] and (owned == at or in_flight(timer, owner))) then
      redis.pcall('ZREM', key('instance_timers', owner), timer)
      owner = UNASSIGNED
    end
    redis.call('HSET', name, 'at', at)
    redis.call('ZADD', QUEUE, at, timer)
    assign(timer, at, owner)
    wrong = 'it had no time that queue, owner and hash agreed on: put right'
  end
  if row[8] == 'waits' then
    wrong = forget_runs(parent or timer) or wrong
  end
  return wrong
end

local function look_at_inactive(timer, row, queued, listed)
  local name, status, wrong = key('timer', timer), row[1], nil
  if status ~= 'paused' and status ~= 'stopped' and status ~= 'broken' then
    set_aside(timer, row[6], 'broken', DAMAGED .. 'its status was ' .. string.sub(status, 1, 40))
    return 'its status was none of a timer: set aside as broken'
  end
  if queued or (row[6] and score(key('instance_timers', row[6]), timer)) then
    unschedule(timer, row[6])
    wrong = 'it was in the queue though ' .. status .. ': taken out'
  end
  if not listed then
    local is_over = status == 'stopped' and (row[9] == 'finished' or row[9] == 'ended')
    local is_kept = not is_over or (row[10] and row[10] ~= '')
    redis.call('ZADD', INACTIVE, is_kept and '+inf' or whole(NOW + keep), timer)
    wrong = 'it was ' .. status .. ' and not listed: listed'
  end
  return wrong
end

-- Put right what is wrong with a timer; answers what that was, or nil.
local function look_at(timer)
  local row = fields(key('timer', timer), 'status', 'revision', 'created', 'due', 'at', 'owner', 'parent', 'attempts',
    'reason', 'source', 'moving')
  local queued, listed = score(QUEUE, timer), score(INACTIVE, timer)
  if row[1] == 'moving' and row[11] then
    return redis.pcall('SADD', key('departing'), timer) == 1 and 'it was on its way to another shard: it goes on' or nil
  end
  if row[1] and row[2] then
    return (row[1] == 'active' and look_at_active or look_at_inactive)(timer, row, queued, listed)
  end
  local is_there = redis.call('EXISTS', key('timer', timer)) == 1
  if is_there then
    bury(timer)
    return 'its state could not be read: set aside as broken'
  elseif queued or listed or redis.call('EXISTS', key('timer_definition', timer)) == 1 then
    bury(timer)
    return 'there was no such timer: what was left of it is removed'
  end
end

local function scrub(timer)
  local wrong = look_at(timer)
  if wrong then
    report('timer', timer, wrong)
  end
  return wrong
end

-- The same for one that is owned by an instance, or by nobody; answers whether it is taken from it.
local function scrub_owned(timer, owner)
  scrub(timer)
  local row = fields(key('timer', timer), 'status', 'owner')
  if row[1] == 'active' and (row[2] or UNASSIGNED) == owner then
    return false
  end
  if redis.call('ZREM', key('instance_timers', owner), timer) == 1 then
    report('timer', timer, 'it was owned by an instance that its state does not name: taken from it')
  end
  return true
end

-- What is to be done with keys whose id the caller has come upon.
local sweeps = {}

function sweeps.timer(timer)
  scrub(timer)
end

sweeps.timer_definition = sweeps.timer

function sweeps.instance_timers(owner, name)
  if not known[owner] then
    for _, timer in ipairs(redis.call('ZRANGE', name, 0, MOST - 1)) do
      scrub_owned(timer, owner)
    end
  end
end

function sweeps.instance(instance, name)
  if not known[instance] then
    redis.call('DEL', name)
    return 'it was not registered: removed'
  end
end

function sweeps.triggers(timer, name)
  local removed = 0
  for _, trigger in ipairs(redis.call('SMEMBERS', name)) do
    if redis.call('EXISTS', key('timer', trigger)) == 0 then
      removed = removed + redis.call('SREM', name, trigger)
    end
  end
  return removed > 0 and 'it had triggers that are gone: removed' or nil
end

function sweeps.open_runs(timer)
  return forget_runs(timer)
end

function sweeps.declaration(digest, name)
  for instance in pairs(known) do
    local row = fields(key('instance', instance), 'declaration', 'declaring')
    if row[1] == digest or row[2] == digest then
      return
    end
  end
  redis.call('DEL', name)
  return 'no instance had it: removed'
end

function sweeps.dead_timer(letter, name)
  if not redis.call('ZSCORE', DEAD, letter) and redis.call('PTTL', name) == -1 then
    redis.call('DEL', name)
    return 'it was not listed: removed'
  end
end

local KINDS = {timer = 'hash', timer_definition = 'string', instance_timers = 'zset', instance = 'hash', triggers = 'set',
  open_runs = 'zset', declaration = 'set', dead_timer = 'hash'}

local function sweep(what, id)
  local name, kind = key(what, id), KINDS[what]
  local found = redis.call('TYPE', name).ok
  local wrong
  if found ~= 'none' and found ~= kind and what ~= 'timer' and what ~= 'timer_definition' then
    redis.call('DEL', name)
    wrong = 'it was a ' .. found .. ': removed'
  elseif found ~= 'none' then
    wrong = sweeps[what](id, name)
  end
  if wrong then
    report(what, id, wrong)
  end
end

local function list_at(place)
  if place <= 2 then
    return place == 1 and QUEUE or INACTIVE
  end
  return owners[place - 2] and key('instance_timers', owners[place - 2])
end

-- Look at a part of a list; answers how many it were, and how many of them are not in it any more.
local function scrub_part(place, from, most)
  local list = list_at(place)
  local ids = redis.call('ZRANGE', list, from, from + most - 1)
  for _, timer in ipairs(ids) do
    if place <= 2 then
      scrub(timer)
    else
      scrub_owned(timer, owners[place - 2])
    end
  end
  local left = #ids > 0 and redis.call('ZMSCORE', list, unpack(ids)) or {}
  local removed = 0
  for i = 1, #ids do
    removed = removed + (left[i] and 0 or 1)
  end
  return #ids, removed
end

local place, from = string.match(ARGV[4], '^(%d+):(%d+)$')
place, from = tonumber(place or 1), tonumber(from or 0)
local rest = limit
while rest > 0 and list_at(place) do
  local seen, removed = scrub_part(place, from, rest)
  if seen < rest then
    place, from = place + 1, 0
  else
    from = from + seen - removed
  end
  rest = rest - seen
end
if limit > 0 and list_at(place) then
  answer[1] = place .. ':' .. from
end
for i = 7, #ARGV, 2 do
  if KINDS[ARGV[i]] then
    sweep(ARGV[i], ARGV[i + 1])
  end
end
if #answer > 1 then
  count('repaired', (#answer - 1) / 3)
end
send_wake_ups()
return answer
