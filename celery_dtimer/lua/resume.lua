-- Make a paused, stopped or broken timer active again.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] timer id   ARGV[3] revision   ARGV[4] status   ARGV[5] next due in ms
-- ARGV[6] when it is looked at for that   ARGV[7] runs that passed meanwhile   ARGV[8] from which moment on   ARGV[9] until which
-- ARGV[10] entries that the history keeps
-- Returns 1 resumed, 0 no such timer, -4 revision or status are others by now: read the timer again.
-- It may be due at its last_sent: the run is out, and its owner advances it without sending. If it is due later, that run is
-- counted here, since nobody comes upon it any more.
-- Worst case: O(instances + log timers).

check_types()
local id, due, at = ARGV[2], tonumber(ARGV[5]), tonumber(ARGV[6])
local timer = key('timer', id)
local row = fields(timer, 'status', 'revision', 'last_run', 'last_sent', 'due', 'runs')
if not row[1] then
  return 0
elseif row[1] ~= ARGV[4] or row[1] == 'active' or row[2] ~= ARGV[3] then
  return -4
end
due = math.max(due, number(row[3], -1) + 1, number(row[4], -1))
at, due = whole(math.max(at, due)), whole(due)
redis.call('HSET', timer, 'status', 'active', 'due', due, 'at', at)
redis.call('HDEL', timer, 'reason', 'attempts')
if row[4] and row[4] == row[5] and tonumber(due) > number(row[4], math.huge) then
  local run = whole(number(row[6], 0) + 1)
  redis.call('HSET', timer, 'last_run', row[4], 'runs', run)
  redis.call('HDEL', timer, 'last_sent')
  note_sent(id, row[4], run)
  count('sent', 1)
end
if not row[5] then
  redis.call('HSET', timer, 'armed', whole(NOW)) -- until now it had no next run
end
if ARGV[7] ~= '0' then
  note_passed(id, 'paused', ARGV[7], ARGV[8], ARGV[9])
end
redis.call('ZREM', INACTIVE, id)
redis.call('ZADD', QUEUE, at, id)
assign(id, at, placement(candidates())())
write_history('', ARGV[10])
send_wake_ups()
return 1
