-- Pause an active timer; its due time stays, so that its cadence does.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] timer id
-- Returns 1 paused now, 2 was paused before, 0 no such timer, -3 stopped or broken: nothing to pause.
-- Worst case: O(instances + log timers).

check_types()
local row = fields(key('timer', ARGV[2]), 'status', 'owner')
if not row[1] then
  return 0
elseif row[1] == 'paused' then
  return 2
elseif row[1] ~= 'active' then
  return -3
end
set_aside(ARGV[2], row[2], 'paused', '')
return 1
