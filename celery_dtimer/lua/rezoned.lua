-- Note by which time zone the timers of a source go that name none.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   ARGV[3] epoch   ARGV[4] source   ARGV[5] time zone
-- Returns 1, or -1 when the epoch is over.
-- Worst case: O(1).

if not holds_epoch(ARGV[2], ARGV[3]) then
  return FENCED
end
redis.call('HSET', META, 'timezone:' .. ARGV[4], ARGV[5])
return 1
