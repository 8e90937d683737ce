-- Remove up to ARGV[2] one-shots that have run and have been kept long enough.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] limit
-- Returns how many were removed.
-- Worst case: O(limit log timers).

local ids = redis.call('ZRANGEBYSCORE', INACTIVE, '-inf', whole(NOW), 'LIMIT', 0, ARGV[2])
for _, id in ipairs(ids) do
  erase_family(id)
end
return #ids
