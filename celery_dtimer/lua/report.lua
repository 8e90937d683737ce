-- Write what an instance says of itself: how it dispatches, and whether its broker works.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   ARGV[3] epoch   ARGV[4..] fields and values of the instance's hash
-- Returns 1, or -1 when the epoch is over.
-- Worst case: O(fields).

local id = ARGV[2]
if not holds_epoch(id, ARGV[3]) then
  return FENCED
end
redis.call('HSET', key('instance', id), unpack(ARGV, 4))
return 1
