-- Create timers, or replace their definitions.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   then per timer, ten values:
--   id, revision and status as they were read ("" and "" for none), new revision, new status,
--   due in ms ("" none, "keep" as stored), source ("" not static), reason, definition, 1 for a new creation
-- Returns per timer its creation in ms, or 0 when it is not as it was read: then nothing of this timer was written.
-- A due time is later than the timer's last run, whatever was asked for.
-- Worst case: O(instances + timers of the call * log timers).

local STRIDE = 10
local choose = placement(candidates())

local function write(timer, row, i)
  local id, revision, status, due = ARGV[i], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5]
  local source, reason, definition, anew = ARGV[i + 6], ARGV[i + 7], ARGV[i + 8], ARGV[i + 9] == '1'
  local created = whole(number(row.created, NOW))
  if not row.revision then
    redis.call('DEL', timer)
    created = whole(NOW)
  elseif anew then
    redis.call('HDEL', timer, 'last_run', 'last_sent', 'runs', 'skipped')
    row.last_run, row.last_sent, created = false, false, whole(NOW)
  end
  local at
  if due == 'keep' then
    due, at = row.due, row.due and whole(number(row.at, number(row.due, NOW)))
  elseif due ~= '' then
    due = whole(math.max(tonumber(due), number(row.last_run, -1) + 1, number(row.last_sent, -1) + 1))
    at = due
  end
  local values = {'status', status, 'revision', revision, 'created', created}
  local function set(field, value)
    values[#values + 1] = field
    values[#values + 1] = value
  end
  if due and due ~= '' then
    set('due', due)
    set('at', at)
  elseif row.revision then
    redis.call('HDEL', timer, 'due', 'at')
  end
  if source ~= '' then
    set('source', source)
    redis.call('SADD', key('static_timers', source), id)
  end
  if row.source and row.source ~= source then
    redis.call('SREM', key('static_timers', row.source), id)
    if source == '' then
      redis.call('HDEL', timer, 'source')
    end
  end
  local owner = status == 'active' and (still_there(row.owner) or choose())
  if owner then
    set('owner', owner)
    redis.call('ZADD', QUEUE, at, id)
    redis.call('ZADD', key('instance_timers', owner), at, id)
    wake(owner)
  end
  redis.call('HSET', timer, unpack(values))
  redis.call('SET', key('timer_definition', id), definition)
  if not owner then
    set_aside(id, row.owner, status, reason)
  elseif row.revision then
    redis.call('HDEL', timer, 'reason')
    redis.call('ZREM', INACTIVE, id)
  end
  return tonumber(created)
end

local answer = {}
for i = 2, #ARGV, STRIDE do
  local timer = key('timer', ARGV[i])
  local values = fields(timer, 'revision', 'status', 'owner', 'created', 'due', 'at', 'last_run', 'last_sent', 'source')
  local row = {revision = values[1], status = values[2], owner = values[3], created = values[4], due = values[5],
    at = values[6], last_run = values[7], last_sent = values[8], source = values[9]}
  if (row.revision or '') == ARGV[i + 1] and (not row.revision or row.status == ARGV[i + 2]) then
    table.insert(answer, write(timer, row, i))
  else
    table.insert(answer, 0)
  end
end
send_wake_ups()
return answer
