-- Renew an instance's lease, and note what this server lacks of what was confirmed to it under its epoch.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   ARGV[3] epoch
-- ARGV[4] moment of the last heartbeat that was confirmed, or ""   ARGV[5] number of the last commit that was, or ""
-- ARGV[6] entries that the history keeps
-- An instance that is leaving is not renewed: its call may have been on its way when it left.
-- Returns {now, members, moment at which another instance is dead: -1 none, 0 at once, how often something was lacking, and
-- the last such span: from, until}, or -1 when the epoch is over.
-- Worst case: O(instances).

local id = ARGV[2]
if not holds_epoch(id, ARGV[3]) then
  return FENCED
end
if fields(key('instance', id), 'status')[1] == 'leaving' then
  return FENCED
end
forgive_silence()
local instance = key('instance', id)
local known = fields(instance, 'heartbeat_at', 'commit_sequence', 'replay_noted')
local heartbeat, sequence = tonumber(ARGV[4]), tonumber(ARGV[5])
local lacks_commits = sequence and number(known[2], 0) < sequence
if known[3] then
  redis.call('HDEL', instance, 'replay_noted') -- a commit has noted it
elseif lacks_commits or heartbeat and number(known[1], 0) < heartbeat then
  note_replay(id, last_known(id), ARGV[6])
end
if lacks_commits then
  redis.call('HSET', instance, 'commit_sequence', ARGV[5])
end
redis.call('ZADD', INSTANCES, whole(NOW), id)
redis.call('HSET', instance, 'heartbeat_at', whole(NOW))
local replays = fields(instance, 'replays', 'replayed_from', 'replayed_until')
return {NOW, number(redis.call('HGET', META, 'members'), 0), next_expiry(id), number(replays[1], 0),
  number(replays[2], 0), number(replays[3], 0)}
