-- Move up to ARGV[5] timers from instances with more than their share to those with less, latest due first.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id of the caller   ARGV[3] epoch
-- ARGV[4] drift that is left alone, in percent of a share (0: none)   ARGV[5] limit
-- ARGV[6] ms by which an instance may be late with its first timer and still be given others
-- Returns {moved, 1 when more is to be done}, -1 when the caller's epoch is over, -2 when another instance is moving timers.
-- Sticky: only a surplus moves, and what is due within 20 ms stays for the next pass.
-- Worst case: O(instances^2 + limit log timers).

check_types()
local IMMINENT = 20
local id, drift, limit, late = ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5]), NOW - tonumber(ARGV[6])
local hindered = hindrance(id, ARGV[3])
if hindered then
  return hindered
end
local live = candidates()
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
local share, rest = math.floor(total / #live), total % #live
if drift > 0 and live[1].load - live[#live].load <= math.max(1, total / #live * drift / 100) then
  return {0, 0}
end
local surplus, room, deficits = 0, 0, {}
for i, instance in ipairs(live) do
  instance.target = share + (i <= rest and 1 or 0)
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
