-- Hand over up to ARGV[3] timers of an instance to the other live ones, soonest due first; from the first call on it is
-- draining: it is given none, unless nobody else is alive, until it registers anew or undrain.lua.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   ARGV[3] limit
-- Returns {moved, how many it owns still}; 0 when no such instance is registered, -3 when no other live instance with a
-- broker could take them: then nothing was written; -2 when another one is moving timers: it is draining, and nothing has
-- moved.
-- What it may be publishing (with confirmed dispatch) stays until that is over, or it is dead. One that is leaving stays so.
-- Worst case: O(instances + (limit + timers in flight) log timers).

check_types()
local id, limit = ARGV[2], tonumber(ARGV[3])
local instance, own = key('instance', id), key('instance_timers', id)
if not redis.call('ZSCORE', INSTANCES, id) then
  return 0
end
local takers = {}
for _, other in ipairs(candidates(id)) do
  if other.status == 'active' and other.broker ~= 'down' then
    table.insert(takers, other)
  end
end
if #takers == 0 then
  return -3
end
local status = fields(instance, 'status')[1]
if status ~= 'leaving' and status ~= 'draining' then
  redis.call('HSET', instance, 'status', 'draining')
end
local mover = 'drain:' .. id
if not may_move(mover) then
  return BUSY
end

local spared, count = {}, 0
if is_at_work(id) then
  for timer in string.gmatch(fields(instance, 'in_flight')[1] or '', '%S+') do
    spared[timer], count = true, count + 1
  end
end
local rows = redis.call('ZRANGE', own, 0, limit + count - 1, 'WITHSCORES')
local taken = {}
for i = 1, #rows, 2 do
  if not spared[rows[i]] and #taken < 2 * limit then
    add(taken, rows[i], rows[i + 1])
  end
end
move(taken, own, placement(takers))
local moved, left = #taken / 2, redis.call('ZCARD', own)
local more = left > 0 and #rows / 2 == limit + count and 1 or 0
keep_mover(mover, moved, more)
send_wake_ups()
return {moved, left}
