-- Remove up to ARGV[2] one-shots that have run and have been kept long enough.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] limit
-- Returns how many were removed.
-- Worst case: O(instances + limit log timers).

check_types()
local ids = redis.call('ZRANGEBYSCORE', INACTIVE, '-inf', whole(NOW), 'LIMIT', 0, ARGV[2])
local removed = 0
for _, id in ipairs(ids) do
  local row = fields(key('timer', id), 'status', 'reason')
  if not row[1] or (row[1] == 'stopped' and (row[2] == 'finished' or row[2] == 'ended')) then
    erase_family(id)
    removed = removed + 1
  else
    redis.call('ZADD', INACTIVE, '+inf', id) -- its time was edited by hand
  end
end
return removed
