-- Remove dead letters up to a moment, the oldest first.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] the moment in ms, "" for all   ARGV[3] limit
-- Returns how many were removed.
-- Worst case: O(limit log letters).

local until_ms = ARGV[2] == '' and '+inf' or ARGV[2]
local ids = redis.call('ZRANGEBYSCORE', DEAD, '-inf', until_ms, 'LIMIT', 0, ARGV[3])
for _, id in ipairs(ids) do
  drop_letter(id)
end
return #ids
