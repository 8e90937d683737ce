-- Hand over up to ARGV[4] timers of an instance whose broker does not work to those whose broker does, soonest due first.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   ARGV[3] epoch   ARGV[4] limit
-- Returns {moved, 1 when timers are left that another would take}, -1 when the epoch is over, -2 when another instance is
-- moving timers. Nothing moves while nobody else says that its broker works. The instance stays registered.
-- Worst case: O(instances + limit log timers).

check_types()
local id = ARGV[2]
local hindered = hindrance(id, ARGV[3])
if hindered then
  return hindered
end
local takers = {}
for _, instance in ipairs(candidates()) do
  if instance.id ~= id and instance.broker == 'up' then
    table.insert(takers, instance)
  end
end
if #takers == 0 then
  return {0, 0}
end
local moved = hand_over(id, takers, tonumber(ARGV[4]))
local more = redis.call('ZCARD', key('instance_timers', id)) > 0 and 1 or 0
keep_mover(id, moved, more)
send_wake_ups()
return {moved, more}
