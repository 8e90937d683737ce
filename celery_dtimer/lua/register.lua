-- Register an instance: from now on it may act, under the epoch that is answered.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   ARGV[3] heartbeat interval in ms   ARGV[4] instance timeout in ms
-- ARGV[5] epoch that it has had before, or ""   ARGV[6] entries that the history keeps
-- ARGV[7..] further fields and values of the instance's hash
-- Returns {epoch, now, members, the last epoch before that the server knows}. That one is smaller than the instance's own
-- when the server lacks its registration: then what it lacks is noted, unless it is everything. The epoch is larger than any handed out before: a replica promoted without the last write
-- would hand out a plain counter twice.
-- As every script it fails, and writes nothing, where the stored schema is newer than the caller's; that is raised once no
-- instance is registered that does not know it.
-- Worst case: O(instances).

local id, former = ARGV[2], number(ARGV[5], 0)
local heard = registered()
local newest = #heard > 0 and heard[#heard].heartbeat or 0
forgive_silence()
local last = number(redis.call('HGET', META, 'last_epoch'), 0)
local epoch = math.max(last + 1, NOW)
redis.call('HSET', META, 'last_epoch', whole(epoch))
local members = count_change()
redis.call('DEL', key('instance', id))
redis.call('HSET', key('instance', id), 'id', id, 'epoch', whole(epoch), 'status', 'active',
  'started_at', whole(NOW), 'heartbeat_at', whole(NOW), 'heartbeat_interval', ARGV[3], 'instance_timeout', ARGV[4],
  'schema', SCHEMA, unpack(ARGV, 7))
redis.call('ZADD', INSTANCES, whole(NOW), id)
raise_schema()
if last > 0 and last < former then
  note_replay(id, math.max(last, newest), ARGV[6])
end
return {whole(epoch), NOW, members, whole(last)}
