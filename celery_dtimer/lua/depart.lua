-- Take timers out of this shard, for another one; until moved.lua they are kept here, as "moving", and nothing else.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2..] timer ids
-- Returns for each a list that begins with a code:
--   1  it is to arrive elsewhere as told: its definition, "" if it has none; when it is purged, "" if it is active;
--      a list of fields and values of its hash; a list of its runs that are out: task id, end of the lease, what is known
--   0  there is none
--   2  its owner may be publishing it just now: nothing was written; ask again
--   3  it has triggers that have to move before it: their ids, some of them; nothing was written
-- Asking again for what is moving already is answered the same.
-- Worst case: O(timers of the call * (size of a timer + log timers)).

local SOME = 100
local DEPARTING = key('departing')

local function runs_out(id)
  local found, rows = {}, redis.pcall('ZRANGE', key('open_runs', id), 0, MOST_RUNS - 1, 'WITHSCORES')
  for i = 1, rows.err and 0 or #rows, 2 do
    local text = redis.pcall('HGET', RUNNING, rows[i])
    if type(text) == 'string' then
      found[#found + 1] = rows[i]
      found[#found + 1] = rows[i + 1]
      found[#found + 1] = text
    end
  end
  return found
end

local function told(id)
  local hash, kept, until_ = redis.call('HGETALL', key('timer', id)), {}, ''
  for i = 1, #hash, 2 do
    local field, value = hash[i], hash[i + 1]
    if field == 'moving' then
      kept[#kept + 1] = 'status'
      kept[#kept + 1] = value
    elseif field == 'moving_until' then
      until_ = value
    elseif field ~= 'status' and field ~= 'owner' then
      kept[#kept + 1] = field
      kept[#kept + 1] = value
    end
  end
  local definition = redis.pcall('GET', key('timer_definition', id))
  return {1, type(definition) == 'string' and definition or '', until_, kept, runs_out(id)}
end

redis.call('SCARD', DEPARTING)
local answer = {}
for i = 2, #ARGV do
  local id = ARGV[i]
  local name = key('timer', id)
  local row = fields(name, 'status', 'owner')
  local triggers = redis.pcall('SRANDMEMBER', key('triggers', id), SOME)
  if not row[1] then
    bury(id)
    answer[#answer + 1] = {0}
  elseif not triggers.err and #triggers > 0 then
    answer[#answer + 1] = {3, unpack(triggers)}
  elseif row[1] == 'active' and in_flight(id, row[2]) and is_at_work(row[2]) then
    answer[#answer + 1] = {2}
  else
    if row[1] ~= 'moving' then
      local until_ = redis.call('ZSCORE', INACTIVE, id)
      unschedule(id, row[2])
      redis.call('ZREM', INACTIVE, id)
      redis.call('HSET', name, 'status', 'moving', 'moving', row[1], 'moving_until', until_ or '')
      redis.call('SADD', DEPARTING, id)
    end
    answer[#answer + 1] = told(id)
  end
end
return answer
