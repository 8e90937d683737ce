-- Answer what marks the data of this service: an export tells it, so that an import knows where it came from.
-- KEYS[1] meta   KEYS[2] never
-- Both are those of the service itself, without a shard.
-- ARGV[1] now or ""   ARGV[2] the mark that it gets if it has none, or "" only to ask
-- Returns the mark, "" when there is none. It goes with the data.
-- Worst case: O(1).

local found = fields(META, 'origin')[1]
if not found and ARGV[2] ~= '' then
  redis.call('HSET', META, 'origin', ARGV[2])
  found = ARGV[2]
end
return found or ''
