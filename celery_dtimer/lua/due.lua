-- Read the due timers of one instance.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   ARGV[3] epoch   ARGV[4] how they are read: see read_due() (prelude.lua)
-- Returns the list of read_due(), or the number -1 when the epoch is over.
-- Worst case: O(instances + limit * log timers).

if not holds_epoch(ARGV[2], ARGV[3]) then
  return FENCED
end
return read_due(ARGV[2], ARGV[4])
