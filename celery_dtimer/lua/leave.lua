-- Hand over up to ARGV[4] timers of an instance that goes, soonest due first; the registration goes with the last one.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   ARGV[3] epoch   ARGV[4] limit
-- Returns {moved, 1 when timers are left}, or -1 when the epoch is over. What is left when nobody calls again is taken by
-- the failure check: the instance counts as dead from its first call on.
-- Worst case: O(instances + limit log timers).

check_types()
local id = ARGV[2]
if not holds_epoch(id, ARGV[3]) then
  return FENCED
end
redis.call('HSET', key('instance', id), 'status', 'leaving')
redis.call('ZADD', INSTANCES, 0, id)
local moved = hand_over(id, candidates(), tonumber(ARGV[4]))
local left = redis.call('ZCARD', key('instance_timers', id))
if left == 0 then
  for _, other in ipairs(redis.call('ZRANGE', INSTANCES, 0, -1)) do
    wake(other)
  end
  forget(id)
end
send_wake_ups()
return {moved, left > 0 and 1 or 0}
