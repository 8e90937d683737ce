-- Say which static timers an instance's code declares, and learn whose declaration counts.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   ARGV[3] epoch   ARGV[4] source   ARGV[5] digest of the declaration
-- ARGV[6] 1 when these are the last ids   ARGV[7..] timer ids
-- Returns 1 when this declaration counts: of those of the live instances it is the one first seen last; 0 when a newer one
-- does, or more ids are to come; -1 when the epoch is over. A declaration that is new here changes the membership: who
-- declared before may now be the one that has to write, or to delete.
-- Worst case: O(instances + ids of the call).

local id, source, digest = ARGV[2], ARGV[4], ARGV[5]
if not holds_epoch(id, ARGV[3]) then
  return FENCED
end
local KEPT = 100 -- declarations remembered for each source
local seen = key('declarations', source)
if #ARGV > 6 then
  redis.call('SADD', key('declaration', digest), unpack(ARGV, 7))
end
if ARGV[6] ~= '1' then
  redis.call('HSET', key('instance', id), 'declaring', digest)
  return 0
end
if not redis.call('ZSCORE', seen, digest) then
  local latest = redis.call('ZRANGE', seen, -1, -1, 'WITHSCORES')[2]
  redis.call('ZADD', seen, whole(math.max(NOW, tonumber(latest or 0) + 1)), digest)
  redis.call('ZREMRANGEBYRANK', seen, 0, -KEPT - 1)
end
local former = fields(key('instance', id), 'declaration')[1]
if former ~= digest then
  count_change()
end
redis.call('HSET', key('instance', id), 'source', source, 'declaration', digest)
redis.call('HDEL', key('instance', id), 'declaring')
if former ~= digest then
  drop_declaration(former)
end
local own = tonumber(redis.call('ZSCORE', seen, digest))
for _, instance in ipairs(registered()) do
  local row = fields(key('instance', instance.id), 'source', 'declaration')
  if row[1] == source and row[2] and instance.status ~= 'leaving' then
    if tonumber(redis.call('ZSCORE', seen, row[2]) or 0) > own then
      return 0
    end
  end
end
return 1
