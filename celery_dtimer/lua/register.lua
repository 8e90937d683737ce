-- Register an instance: from now on it may act, under the epoch that is answered.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   ARGV[3] heartbeat interval in ms   ARGV[4] instance timeout in ms
-- ARGV[5..] further fields and values of the instance's hash
-- Returns {epoch, now, members}. The epoch is larger than any handed out before: a replica promoted without the last write
-- would hand out a plain counter twice.
-- Worst case: O(instances).

local id = ARGV[2]
forgive_silence()
local last = number(redis.call('HGET', META, 'last_epoch'), 0)
local epoch = math.max(last + 1, NOW)
redis.call('HSET', META, 'last_epoch', whole(epoch))
local members = count_change()
redis.call('DEL', key('instance', id))
redis.call('HSET', key('instance', id), 'id', id, 'epoch', whole(epoch), 'status', 'active',
  'started_at', whole(NOW), 'heartbeat_at', whole(NOW), 'heartbeat_interval', ARGV[3], 'instance_timeout', ARGV[4],
  unpack(ARGV, 5))
redis.call('ZADD', INSTANCES, whole(NOW), id)
return {whole(epoch), NOW, members}
