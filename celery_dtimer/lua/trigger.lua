-- Run a timer now: create a hidden one-shot that sends what its parent would, and goes with its commit.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] timer id   ARGV[3] id of the one-shot
-- Returns 1, 0 no such timer, -3 the timer has no definition to send (a one-shot that has run, or a broken one).
-- Worst case: O(instances + log timers).

local parent, id = ARGV[2], ARGV[3]
local row = fields(key('timer', parent), 'status', 'revision', 'reason', 'parent')
if not row[1] or row[4] then
  return 0
elseif row[1] == 'broken' or row[3] == 'finished' then
  return -3
end
local now = whole(NOW)
redis.call('HSET', key('timer', id), 'status', 'active', 'revision', row[2], 'created', now, 'due', now, 'at', now,
  'parent', parent)
redis.call('SADD', key('triggers', parent), id)
redis.call('ZADD', QUEUE, now, id)
assign(id, now, placement(candidates())())
send_wake_ups()
return 1
