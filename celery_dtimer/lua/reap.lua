-- Move up to ARGV[4] timers of instances that are dead, and of nobody, to the live ones, soonest due first; the
-- registration of a dead instance goes with its last timer.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id of the caller   ARGV[3] epoch   ARGV[4] limit
-- Returns {moved, 1 when more is to be done, next expiry as heartbeat answers it, per reaped instance: id, ms since its last
-- heartbeat},
-- -1 when the caller's epoch is over, -2 when another instance is moving timers.
-- Worst case: O(instances + limit log timers).

check_types()
local id, limit = ARGV[2], tonumber(ARGV[4])
local hindered = hindrance(id, ARGV[3])
if hindered then
  return hindered
end
forgive_silence()

local dead, silent = {UNASSIGNED}, {}
for _, instance in ipairs(registered()) do
  if instance.id ~= id and NOW - instance.heartbeat > instance.timeout then
    table.insert(dead, instance.id)
    silent[instance.id] = NOW - instance.heartbeat
  end
end
local live = candidates()
local moved, more, reaped = 0, 0, {}
for _, from in ipairs(dead) do
  local waiting = redis.call('ZCARD', key('instance_timers', from))
  if waiting > 0 and #live > 0 and moved < limit then
    local count = hand_over(from, live, limit - moved)
    moved, waiting = moved + count, waiting - count
  end
  if waiting > 0 then
    more = #live > 0 and 1 or 0
  elseif from ~= UNASSIGNED then
    forget(from)
    add(reaped, from, silent[from])
  end
end
keep_mover(id, moved, more)
send_wake_ups()
return {moved, more, next_expiry(id), unpack(reaped)}
