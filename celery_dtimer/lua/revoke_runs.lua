-- Note that runs are revoked for a later one of their timers: they hold up nothing any more, and are never lost.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] entries that the history keeps   ARGV[3] why   ARGV[4..] task ids
-- Returns how many of them were out.
-- Their ids are kept for a day, the newest 50,000, for workers that could not be told: a message may be waiting for them.
-- Worst case: O(runs of the call * log runs that are out).

local KEPT_MS = 86400000
local MOST_REVOKED = 50000 -- as many as Celery's workers remember
local closed = 0
for i = 4, #ARGV do
  local task = ARGV[i]
  redis.pcall('ZADD', REVOKED, whole(NOW), task)
  local timer, due, number_, shard, retries = lease_of(task)
  if timer then
    note_run(ARGV[2], task, timer, due, number_, shard, retries, 'revoked', 'error', ARGV[3])
    close_run(task, timer)
    closed = closed + 1
  end
end
redis.pcall('ZREMRANGEBYSCORE', REVOKED, '-inf', whole(NOW - KEPT_MS))
redis.pcall('ZREMRANGEBYRANK', REVOKED, 0, -MOST_REVOKED - 1)
send_wake_ups()
return closed
