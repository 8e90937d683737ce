-- Forget timers that have departed from this shard and arrived in another one. Called there too, it lets an arrival be
-- forgotten in a while: until then, nobody who is slow can have it arrive again.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2..] timer ids, "letter:" and the id of a dead letter, or "run:" and a task id
-- Returns how many were moving from here.
-- Worst case: O(timers of the call * (runs that are out + log timers)).

local KEPT_MS = 600000
local DEPARTING, ARRIVALS = key('departing'), key('arrivals')
redis.call('SCARD', DEPARTING)
redis.call('ZCARD', ARRIVALS)
local moved = 0
for i = 2, #ARGV do
  local id = ARGV[i]
  if fields(key('timer', id), 'status')[1] == 'moving' then
    local open = key('open_runs', id)
    local tasks = redis.pcall('ZRANGE', open, 0, MOST_RUNS - 1)
    for _, task in ipairs(tasks.err and {} or tasks) do
      drop_lease(task)
    end
    redis.call('DEL', open)
    erase(id, true)
    moved = moved + 1
  else
    redis.call('ZADD', ARRIVALS, 'XX', whole(NOW), arrival(id))
  end
  redis.call('SREM', DEPARTING, id)
end
redis.call('ZREMRANGEBYSCORE', ARRIVALS, '-inf', whole(NOW - KEPT_MS))
return moved
