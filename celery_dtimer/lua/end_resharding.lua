-- End what begin_resharding.lua has begun: every timer is where it belongs.
-- KEYS[1] meta   KEYS[2] never
-- Both are those of the service itself, without a shard.
-- ARGV[1] now or ""   ARGV[2] number of the layout that was begun
-- Returns the layout as layout.lua does; when that is another by now, nothing is written: somebody else has ended it, and may
-- have begun another one.
-- Worst case: O(1).

local _, wanted, known = unpack(layout())
if wanted ~= 0 and known == tonumber(ARGV[2]) then
  redis.call('HSET', META, 'shards', whole(wanted), 'layout', whole(known + 1))
  redis.call('HDEL', META, 'shards_wanted')
end
return layout()
