-- Put the leases of runs that are out into this shard, where their timers are by now.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   then per run: task id, end of its lease, what RUNNING says of it
-- Returns how many were new here. One that is here, or has ended since it arrived in this layout, stays as it is.
-- Worst case: O(runs of the call * log runs that are out).

local ARRIVALS = key('arrivals')
redis.call('ZCARD', ARRIVALS)
redis.call('ZCARD', RUN_LEASES)
local arrived = 0
for i = 2, #ARGV, 3 do
  local mark = arrival('run:' .. ARGV[i])
  if not redis.call('ZSCORE', ARRIVALS, mark) and not redis.call('HGET', RUNNING, ARGV[i]) then
    put_lease(ARGV[i], ARGV[i + 1], ARGV[i + 2])
    arrived = arrived + 1
  end
  redis.call('ZADD', ARRIVALS, 'NX', '+inf', mark)
end
return arrived
