-- Read up to ARGV[4] due timers of one instance.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   ARGV[3] epoch   ARGV[4] limit
-- ARGV[5] 1 to note them as in flight, because they are published before they are committed
-- Returns the list of read_due() (prelude.lua), or the number -1 when the epoch is over.
-- Worst case: O(instances + limit * log timers).

if not holds_epoch(ARGV[2], ARGV[3]) then
  return FENCED
end
return read_due(ARGV[2], tonumber(ARGV[4]), ARGV[5] == '1', true)
