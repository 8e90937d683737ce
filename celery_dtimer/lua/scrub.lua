-- Repair up to ARGV[5] timers of the queue, from position ARGV[4] on: what was deleted or edited by hand.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   ARGV[3] epoch   ARGV[4] position   ARGV[5] limit
-- Returns {next position or 0 at the end, then per repair: timer id, what was wrong}, or -1 when the epoch is over.
-- Worst case: O(limit log timers).

local position, limit = tonumber(ARGV[4]), tonumber(ARGV[5])
if not holds_epoch(ARGV[2], ARGV[3]) then
  return FENCED
end
local rows = redis.call('ZRANGE', QUEUE, position, position + limit - 1, 'WITHSCORES')
local answer, removed, known = {0}, 0, {[UNASSIGNED] = true}
local function report(id, wrong)
  table.insert(answer, id)
  table.insert(answer, wrong)
end
for i = 1, #rows, 2 do
  local id, at = rows[i], rows[i + 1]
  local row = fields(key('timer', id), 'status', 'owner', 'at')
  local owner = row[2] or UNASSIGNED
  if known[owner] == nil then
    known[owner] = redis.call('ZSCORE', INSTANCES, owner) and true or false
  end
  if row[1] ~= 'active' then
    unschedule(id, owner)
    removed = removed + 1
    if not row[1] then
      bury(id)
    end
    report(id, row[1] and 'in the queue though ' .. row[1] or 'in the queue without a timer')
  elseif row[3] ~= at or not known[owner] or redis.call('ZSCORE', key('instance_timers', owner), id) ~= at then
    redis.call('ZREM', key('instance_timers', owner), id)
    redis.call('HSET', key('timer', id), 'at', at)
    assign(id, at, UNASSIGNED)
    report(id, 'with another time, or no owner that knows it')
  end
end
if #rows / 2 == limit then
  answer[1] = position + limit - removed
end
return answer
