-- Put timers that have departed from another shard into this one, each once, whoever else does the same.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""
-- then per timer: id, definition, when it is purged or "", number of fields and values of its hash, these, number of what
--   describes its runs that are out, that: as depart.lua tells them
-- Returns how many were new here. One that is here, or has been deleted since it arrived in this layout, stays as it is.
-- Worst case: O(instances + timers of the call * (size of a timer + log timers)).

local ARRIVALS = key('arrivals')
redis.call('ZCARD', ARRIVALS)
redis.call('ZCARD', QUEUE)
redis.call('ZCARD', INACTIVE)
local choose = placement(candidates())
local arrived, position = 0, 2

local function part(from)
  local count = tonumber(ARGV[from])
  return from + 1, from + count
end

while position <= #ARGV do
  local id, definition, until_ = ARGV[position], ARGV[position + 1], ARGV[position + 2]
  local first, last = part(position + 3)
  local first_run, last_run = part(last + 1)
  position = last_run + 1
  local name = key('timer', id)
  if not redis.call('ZSCORE', ARRIVALS, arrival(id)) and redis.call('EXISTS', name) == 0 then
    redis.call('HSET', name, unpack(ARGV, first, last))
    if definition ~= '' then
      redis.call('SET', key('timer_definition', id), definition)
    end
    local row = fields(name, 'status', 'at', 'source', 'parent')
    if row[1] == 'active' then
      local at = whole(number(row[2], NOW))
      redis.call('HSET', name, 'at', at)
      redis.call('ZADD', QUEUE, at, id)
      assign(id, at, choose())
    else
      redis.call('ZADD', INACTIVE, until_ ~= '' and until_ or '+inf', id)
    end
    if row[3] and row[3] ~= '' then
      redis.pcall('SADD', key('static_timers', row[3]), id)
    end
    if row[4] then
      redis.pcall('SADD', key('triggers', row[4]), id)
    end
    for i = first_run, last_run, 3 do
      put_lease(ARGV[i], ARGV[i + 1], ARGV[i + 2])
      redis.pcall('ZADD', key('open_runs', id), ARGV[i + 1], ARGV[i])
    end
    arrived = arrived + 1
  end
  redis.call('ZADD', ARRIVALS, 'NX', '+inf', arrival(id))
end
send_wake_ups()
return arrived
