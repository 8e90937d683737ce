-- Put dead letters into this shard, where their timers are by now, each once.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   then per letter: id, when it was written, number of its fields and values, these
-- Returns how many were new here. One that is here, or has been taken since it arrived in this layout, stays as it is.
-- Worst case: O(letters of the call * (size of a letter + log letters)).

local ARRIVALS = key('arrivals')
redis.call('ZCARD', ARRIVALS)
redis.call('ZCARD', DEAD)
local arrived, position = 0, 2
while position <= #ARGV do
  local id, at, first = ARGV[position], ARGV[position + 1], position + 3
  local last = position + 2 + tonumber(ARGV[position + 2])
  position = last + 1
  local mark = arrival('letter:' .. id)
  if not redis.call('ZSCORE', ARRIVALS, mark) and not redis.call('ZSCORE', DEAD, id) then
    redis.call('DEL', key('dead_timer', id))
    redis.call('HSET', key('dead_timer', id), unpack(ARGV, first, last))
    redis.call('ZADD', DEAD, at, id)
    arrived = arrived + 1
  end
  redis.call('ZADD', ARRIVALS, 'NX', '+inf', mark)
end
return arrived
