-- Say into how many shards a service is split; who asks first decides that.
-- KEYS[1] meta   KEYS[2] never
-- Both are those of the service itself, without a shard.
-- ARGV[1] now or ""   ARGV[2] how many shards a new service has
-- Returns {shards, how many it is being given or 0, number of the layout, the numbers of shards it has ever had, with blanks
-- in between}. A service that has timers, or instances, and has never said it has one shard.
-- Worst case: O(1).

if not redis.call('HGET', META, 'shards') then
  local is_used = redis.call('EXISTS', QUEUE, INACTIVE, INSTANCES) > 0
  local shards = is_used and '1' or ARGV[2]
  redis.call('HSET', META, 'shards', shards, 'shards_seen', shards)
end
return layout()
