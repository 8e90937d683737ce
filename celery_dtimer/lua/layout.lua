-- Say into how many shards a service is split; who asks first decides that.
-- KEYS[1] meta   KEYS[2] never
-- Both are those of the service itself, without a shard.
-- ARGV[1] now or ""   ARGV[2] how many shards a new service has   ARGV[3] what a shard was told of the layout (layout_told in
-- its meta), "" if nothing, "ask" when that is not known   ARGV[4] number of a layout that shards have heard of, else 0
-- Returns {shards, how many it is being given or 0, number of the layout, the numbers of shards it has ever had, with blanks
-- in between}; or 0 when the service does not say, or something that no service has, and ARGV[3] is "ask": then nothing was
-- written. What a shard was told holds again then. A service that has timers, or instances, and has never said it has one
-- shard. The number is at least that which shards have heard of.
-- Worst case: O(1).

local row = fields(META, 'shards', 'shards_seen')
if not shards_in(row[1]) then
  if ARGV[3] == 'ask' then
    return 0
  end
  local shards, wanted, known, seen = string.match(ARGV[3], '^(%d+) (%d+) (%d+) ([%d ]+)$')
  if shards_in(shards) then
    redis.call('HSET', META, 'shards', shards, 'shards_seen', seen, 'layout', known)
    redis.call('HDEL', META, 'shards_wanted')
    if shards_in(wanted) then
      redis.call('HSET', META, 'shards_wanted', wanted)
    end
  else
    local has_said = row[1] or row[2]
    local is_used = not has_said and redis.call('EXISTS', QUEUE, INACTIVE, INSTANCES) > 0
    shards = is_used and '1' or ARGV[2]
    redis.call('HSET', META, 'shards', shards, 'shards_seen', seen_with(row[2], shards))
  end
end
if layout()[3] < tonumber(ARGV[4]) then
  redis.call('HSET', META, 'layout', ARGV[4])
end
return layout()
