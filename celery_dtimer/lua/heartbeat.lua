-- Renew an instance's lease.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   ARGV[3] epoch
-- An instance that is leaving is not renewed: its call may have been on its way when it left.
-- Returns {now, members, moment at which another instance is dead: -1 none, 0 at once}, or -1 when the epoch is over.
-- Worst case: O(instances).

local id = ARGV[2]
if not holds_epoch(id, ARGV[3]) then
  return FENCED
end
if fields(key('instance', id), 'status')[1] == 'leaving' then
  return FENCED
end
forgive_silence()
redis.call('ZADD', INSTANCES, whole(NOW), id)
redis.call('HSET', key('instance', id), 'heartbeat_at', whole(NOW))
return {NOW, number(redis.call('HGET', META, 'members'), 0), next_expiry(id)}
