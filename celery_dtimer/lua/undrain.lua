-- Let an instance that was drained be given timers again.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id
-- Returns 1 when it is active again, 2 when it was not draining: then nothing was written; 0 when no such instance is
-- registered.
-- It gets its share when timers are evened out next.
-- Worst case: O(1).

local instance = key('instance', ARGV[2])
if not redis.call('ZSCORE', INSTANCES, ARGV[2]) then
  return 0
elseif fields(instance, 'status')[1] ~= 'draining' then
  return 2
end
redis.call('HSET', instance, 'status', 'active')
return 1
