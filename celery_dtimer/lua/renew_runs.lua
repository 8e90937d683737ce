-- Renew the leases of the runs that a worker is running.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] ms of the lease   then per run: task id, the message that runs it
-- Returns how many were renewed: not those that are not out, are run by another message, or are to be back by now.
-- Worst case: O(runs of the call * log runs that are out).

local renewed = 0
local until_ms = NOW + tonumber(ARGV[2])
for i = 3, #ARGV, 2 do
  local task, message = ARGV[i], ARGV[i + 1]
  local timer, due, number_, shard, retries, resent, deadline, holder = lease_of(task)
  deadline = tonumber(deadline)
  local expiry = tonumber(timer and redis.call('ZSCORE', RUN_LEASES, task) or 0)
  if timer and (deadline == 0 or deadline > NOW) and (holder == message or expiry <= NOW) then
    if holder ~= message then
      redis.call('HSET', RUNNING, task, lease_text(timer, due, number_, shard, retries, resent, whole(deadline), message))
    end
    keep_lease(task, timer, until_ms, deadline)
    renewed = renewed + 1
  end
end
return renewed
