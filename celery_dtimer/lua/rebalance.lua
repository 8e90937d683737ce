-- Move up to ARGV[5] timers from instances with more than their share to those with less, latest due first.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id of the caller   ARGV[3] epoch
-- ARGV[4] drift that is left alone, in percent of a share (0: none)   ARGV[5] limit
-- ARGV[6] ms by which an instance may be late with its first timer and still be given others
-- Returns {moved, 1 when more is to be done}, -1 when the caller's epoch is over, -2 when another instance is moving timers.
-- Sticky: only a surplus moves, and what is due within 20 ms stays for the next pass. Instances that are drained give away
-- all they have, to those with a broker that are not.
-- Worst case: O(instances^2 + limit log timers).

check_types()
local IMMINENT = 20
local id, drift, limit, late = ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5]), NOW - tonumber(ARGV[6])
local hindered = hindrance(id, ARGV[3])
if hindered then
  return hindered
end
local live = candidates()

-- Add those that are drained and own timers, which they got while nobody else was alive, or kept: they give all away.
local function add_drained()
  for _, instance in ipairs(registered()) do
    local load = redis.call('ZCARD', key('instance_timers', instance.id))
    if instance.status == 'draining' and is_heard(instance) and load > 0 then
      instance.load = load
      table.insert(live, instance)
    end
  end
end

local takers, drained = #live, 0
if takers > 0 and live[1].status == 'active' and live[1].broker ~= 'down' then
  add_drained()
  drained = #live - takers
end
if #live < 2 then
  return {0, 0}
end

table.sort(live, function(a, b)
  return a.load > b.load or (a.load == b.load and a.id < b.id)
end)
local total = 0
for _, instance in ipairs(live) do
  total = total + instance.load
end
local share, rest = math.floor(total / takers), total % takers
if drift > 0 and drained == 0 and live[1].load - live[#live].load <= math.max(1, total / #live * drift / 100) then
  return {0, 0}
end
local surplus, room, deficits = 0, 0, {}
for _, instance in ipairs(live) do
  instance.target = 0
  if drained == 0 or instance.status == 'active' then
    instance.target = share + (rest > 0 and 1 or 0)
    rest = rest - 1
  end
  if instance.load < instance.target then
    local head = redis.call('ZRANGE', key('instance_timers', instance.id), 0, 0, 'WITHSCORES')[2]
    if not head or tonumber(head) >= late then
      table.insert(deficits, instance)
      room = room + instance.target - instance.load
    end
  else
    surplus = surplus + instance.load - instance.target
  end
end

surplus, limit = math.min(surplus, room), math.min(limit, room)
local moved, receiver = 0, 1
for _, donor in ipairs(live) do
  local take = math.min(donor.load - donor.target, limit - moved)
  if take > 0 then
    local rows = redis.call('ZREVRANGE', key('instance_timers', donor.id), 0, take - 1, 'WITHSCORES')
    for i = 1, #rows, 2 do
      local timer, at = rows[i], rows[i + 1]
      local status = fields(key('timer', timer), 'status')[1]
      if status == 'active' and tonumber(at) - NOW >= IMMINENT then
        while deficits[receiver].load >= deficits[receiver].target do
          receiver = receiver + 1
        end
        deficits[receiver].load = deficits[receiver].load + 1
        redis.call('ZREM', key('instance_timers', donor.id), timer)
        assign(timer, at, deficits[receiver].id)
        moved = moved + 1
      end
    end
  end
end
local more = moved < surplus and 1 or 0
if moved > 0 then
  keep_mover(id, moved, more)
end
send_wake_ups()
return {moved, more}
