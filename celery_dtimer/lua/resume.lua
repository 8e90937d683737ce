-- Make a paused, stopped or broken timer active again.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] timer id   ARGV[3] revision   ARGV[4] status   ARGV[5] next due in ms
-- ARGV[6] runs that passed meanwhile, counted as skipped
-- Returns 1 resumed, 0 no such timer, -4 revision or status are others by now: read the timer again.
-- It may be due at its last_sent: the run is out, and its owner advances it without sending.
-- Worst case: O(instances + log timers).

local id, due = ARGV[2], tonumber(ARGV[5])
local timer = key('timer', id)
local row = fields(timer, 'status', 'revision', 'last_run', 'last_sent', 'skipped')
if not row[1] then
  return 0
elseif row[1] ~= ARGV[4] or row[1] == 'active' or row[2] ~= ARGV[3] then
  return -4
end
due = whole(math.max(due, number(row[3], -1) + 1, number(row[4], -1)))
redis.call('HSET', timer, 'status', 'active', 'due', due, 'at', due)
redis.call('HDEL', timer, 'reason', 'attempts')
if ARGV[6] ~= '0' then
  redis.call('HSET', timer, 'skipped', whole(number(row[5], 0) + ARGV[6]))
end
redis.call('ZREM', INACTIVE, id)
redis.call('ZADD', QUEUE, due, id)
assign(id, due, placement(candidates())())
send_wake_ups()
return 1
