-- Note that a worker has started a run, and give the run a lease that the worker renews.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] task id   ARGV[3] timer id   ARGV[4] scheduled moment   ARGV[5] number   ARGV[6] shard
-- ARGV[7] retries   ARGV[8] how often it was sent again   ARGV[9] ms within which it is to be back, 0 for no limit
-- ARGV[10] ms of the lease   ARGV[11] the message, as a text without blanks   ARGV[12] 1 when the broker delivers it again
-- ARGV[13] entries that the history keeps   ARGV[14] the worker
-- Returns 1, or 0 when another message of the run is being run, or waits for its retry, and this one is no later retry: then
-- the lease stays as it is; or 2 when the run was revoked for a later one: then nothing was written.
-- Worst case: O(log runs that are out).

local task, timer = ARGV[2], ARGV[3]
if type(redis.pcall('ZSCORE', REVOKED, task)) == 'string' then
  return 2
end
local retries, message = ARGV[7], ARGV[11]
local known, _, _, _, known_retries, _, _, holder = lease_of(task)
local expiry = tonumber(redis.call('ZSCORE', RUN_LEASES, task) or 0)
note_run(ARGV[13], task, timer, ARGV[4], ARGV[5], ARGV[6], retries, 'started', 'worker', ARGV[14])
if known and tonumber(retries) < tonumber(known_retries) then
  return 0 -- a duplicate of an earlier try
end
local is_later = known and tonumber(retries) > tonumber(known_retries) -- the report of the try before is on its way
if holder and not is_idle(holder) and holder ~= message and expiry > NOW and ARGV[12] ~= '1' and not is_later then
  return 0
end
local limit = tonumber(ARGV[9])
local deadline = limit > 0 and NOW + limit or 0
redis.call('HSET', RUNNING, task, lease_text(timer, ARGV[4], ARGV[5], ARGV[6], retries, ARGV[8], whole(deadline), message))
keep_lease(task, timer, NOW + tonumber(ARGV[10]), deadline)
return 1
