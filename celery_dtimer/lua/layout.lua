-- Say into how many shards a service is split; who asks first decides that.
-- KEYS[1] meta   KEYS[2] never
-- Both are those of the service itself, without a shard.
-- ARGV[1] now or ""   ARGV[2] how many shards a new service has
-- Returns {shards, how many it is being given or 0, number of the layout, the numbers of shards it has ever had, with blanks
-- in between}. A service that has timers, or instances, and has never said it has one shard. One whose answer was edited into
-- what no service has is split as whoever asks first is set to.
-- Worst case: O(1).

local row = fields(META, 'shards', 'shards_seen')
if not shards_in(row[1]) then
  local has_said = row[1] or row[2]
  local is_used = not has_said and redis.call('EXISTS', QUEUE, INACTIVE, INSTANCES) > 0
  local shards = is_used and '1' or ARGV[2]
  redis.call('HSET', META, 'shards', shards, 'shards_seen', seen_with(row[2], shards))
end
return layout()
