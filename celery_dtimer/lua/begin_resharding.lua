-- Begin to split a service into another number of shards.
-- KEYS[1] meta   KEYS[2] never
-- Both are those of the service itself, without a shard.
-- ARGV[1] now or ""   ARGV[2] how many shards it is to have
-- Returns the layout as layout.lua does. When it has as many shards, or is being given some already, nothing is written: the
-- answer tells.
-- Worst case: O(1).

local shards, wanted, known, seen = unpack(layout())
if shards ~= tonumber(ARGV[2]) and wanted == 0 then
  redis.call('HSET', META, 'shards', whole(shards), 'shards_wanted', ARGV[2], 'shards_seen', seen_with(seen, ARGV[2]),
    'layout', whole(known + 1))
end
return layout()
