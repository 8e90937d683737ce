-- Remove keys of the service that are of another type than they must be: edited by hand, they stop what needs them.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""
-- Returns per key that was removed: what it is, the id in it or "", the type that it had. Whoever is registered goes on; what
-- was in a key is put together again by scrub.lua, from what the others say, as far as they do.
-- Whoever comes may call it: without the registered instances nobody has an epoch.
-- Worst case: O(instances), and the size of what is removed.

local answer = {}
local function look_at(kind, what, id)
  local name = id and key(what, id) or key(what)
  local found = redis.call('TYPE', name).ok
  if found == 'none' or found == kind then
    return
  end
  redis.call('DEL', name)
  for _, each in ipairs({what, id or '', found}) do
    answer[#answer + 1] = each
  end
end

for _, what in ipairs({'timer_queue', 'inactive_timers', 'service_instances', 'run_leases', 'revoked_runs', 'dead_timers'}) do
  look_at('zset', what)
end
for _, what in ipairs({'meta', 'running', 'counters'}) do
  look_at('hash', what)
end
look_at('zset', 'arrivals')
look_at('set', 'departing')
look_at('stream', 'history')
look_at('stream', 'runs')
look_at('none', 'never')
look_at('zset', 'instance_timers', UNASSIGNED)
local sources, last = {}, 0
for _, id in ipairs(redis.call('ZRANGE', INSTANCES, 0, -1)) do
  look_at('hash', 'instance', id)
  look_at('zset', 'instance_timers', id)
  local row = fields(key('instance', id), 'source', 'declaration', 'epoch')
  if row[1] and row[2] then
    sources[row[1]] = true
    look_at('set', 'declaration', row[2])
  end
  last = math.max(last, number(row[3], 0))
end
for source in pairs(sources) do
  look_at('set', 'static_timers', source)
  look_at('zset', 'declarations', source)
end
if #answer > 0 then
  if last > number(fields(META, 'last_epoch')[1], 0) then
    redis.call('HSET', META, 'last_epoch', whole(last)) -- no epoch is handed out twice
  end
  raise_schema()
  count_change() -- the instances look at their static schedules again
  count('repaired', #answer / 3)
end
return answer
