-- Run a timer now: create a hidden one-shot that sends what its parent would, and goes with its commit. It has a copy of
-- the definition: a one-shot's own goes when it has run.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] timer id   ARGV[3] id of the one-shot   ARGV[4] traceparent of who asks, or ""
-- Returns 1, 0 no such timer, -3 the timer has no definition to send (a one-shot that has run, or a broken one).
-- Worst case: O(instances + log timers + size of the definition).

check_types()
local parent, id = ARGV[2], ARGV[3]
local row = fields(key('timer', parent), 'status', 'revision', 'reason', 'parent')
local definition = redis.pcall('GET', key('timer_definition', parent))
if not row[1] or row[4] then
  return 0
elseif row[1] == 'broken' or row[3] == 'finished' or type(definition) ~= 'string' then
  return -3
end
if (ARGV[4] or '') == '' then
  add_hidden(id, parent, row[2], definition)
else
  add_hidden(id, parent, row[2], definition, 'trace', ARGV[4])
end
send_wake_ups()
return 1
