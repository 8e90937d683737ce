-- End what begin_resharding.lua has begun: every timer is where it belongs.
-- KEYS[1] meta   KEYS[2] never
-- Both are those of the service itself, without a shard.
-- ARGV[1] now or ""
-- Returns the layout as layout.lua does; when nothing was begun, nothing is written.
-- Worst case: O(1).

local wanted = fields(META, 'shards_wanted')[1]
if wanted then
  redis.call('HSET', META, 'shards', wanted)
  redis.call('HDEL', META, 'shards_wanted')
  redis.call('HINCRBY', META, 'layout', 1)
end
return layout()
