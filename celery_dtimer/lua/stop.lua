-- Stop a timer: it stays, with its definition, until it is resumed or deleted. One that has ended does not go on by itself
-- any more should it get a later end.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] timer id
-- Returns 1 stopped now, 2 was stopped before, 0 no such timer.
-- Worst case: O(instances + log timers).

check_types()
local row = fields(key('timer', ARGV[2]), 'status', 'owner', 'reason')
if not row[1] then
  return 0
elseif row[1] == 'stopped' and row[3] ~= 'ended' then
  return 2
end
set_aside(ARGV[2], row[2], 'stopped', '')
return 1
