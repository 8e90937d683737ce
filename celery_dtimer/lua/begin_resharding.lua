-- Begin to split a service into another number of shards.
-- KEYS[1] meta   KEYS[2] never
-- Both are those of the service itself, without a shard.
-- ARGV[1] now or ""   ARGV[2] how many shards it is to have
-- Returns the layout as layout.lua does. When it has as many shards, or is being given some already, nothing is written: the
-- answer tells.
-- Worst case: O(1).

local row = fields(META, 'shards', 'shards_wanted', 'shards_seen')
if row[1] ~= ARGV[2] and not row[2] then
  local seen = row[3] or row[1] or '1'
  if not string.find(' ' .. seen .. ' ', ' ' .. ARGV[2] .. ' ', 1, true) then
    seen = seen .. ' ' .. ARGV[2]
  end
  redis.call('HSET', META, 'shards', row[1] or '1', 'shards_wanted', ARGV[2], 'shards_seen', seen)
  redis.call('HINCRBY', META, 'layout', 1)
end
return layout()
