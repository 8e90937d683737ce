-- Look at the runs that are out, some at a time, and give a lease to those that have none: else nobody would miss them.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   ARGV[3] epoch   ARGV[4] where to go on: "0" at the beginning   ARGV[5] how many, about
-- ARGV[6] ms of a lease
-- Returns {where to go on, "0" when all has been looked at; then per repair: task id, what was wrong and what was done}, or -1
-- when the epoch is over.
-- Leases of runs that nothing is known of end by themselves; one that never would ends now.
-- Worst case: O(runs of the call * log runs); Redis keeps up to 512 of them together, and then answers all.

if not holds_epoch(ARGV[2], ARGV[3]) then
  return FENCED
end
local found = redis.call('HSCAN', RUNNING, ARGV[4], 'COUNT', ARGV[5])
local endless = redis.call('ZRANGEBYSCORE', RUN_LEASES, '(' .. whole(LAST_MS), '+inf', 'LIMIT', 0, ARGV[5])
local answer = {found[1]}
for _, task in ipairs(endless) do
  redis.call('ZADD', RUN_LEASES, whole(NOW + tonumber(ARGV[6])), task)
  add(answer, task, 'its lease had no end: it has one')
end
local rows = found[2]
for i = 1, #rows, 2 do
  local task = rows[i]
  if not lease_of(task) then
    drop_lease(task)
    add(answer, task, 'what was known of it could not be read: removed')
  elseif not redis.call('ZSCORE', RUN_LEASES, task) then
    redis.call('ZADD', RUN_LEASES, whole(NOW + tonumber(ARGV[6])), task)
    add(answer, task, 'it had no lease: it has one')
  end
end
if #answer > 1 then
  count('repaired', (#answer - 1) / 2)
end
return answer
