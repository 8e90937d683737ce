-- Keep a durable countdown until it is due. It replaces one of the same id: its task has called itself again, say, while the
-- commit of the run was on its way, which then finds another creation and leaves it alone.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] id   ARGV[3] revision   ARGV[4] when it is due in ms, or "+ms" after now   ARGV[5] definition
-- Returns the moment at which it is due.
-- Worst case: O(instances + log timers).

check_types()
local id, due = ARGV[2], ARGV[4]
local timer = key('timer', id)
if string.sub(due, 1, 1) == '+' then
  due = whole(NOW + tonumber(due))
end
local owner
if redis.call('EXISTS', timer) == 1 then
  owner = fields(timer, 'owner')[1]
  unschedule(id, owner)
  redis.call('ZREM', INACTIVE, id)
  redis.call('DEL', timer)
end
owner = still_there(owner) or placement(candidates())()
redis.call('HSET', timer, 'status', 'active', 'revision', ARGV[3], 'created', whole(NOW), 'due', due, 'at', due,
  'owner', owner)
redis.call('SET', key('timer_definition', id), ARGV[5])
redis.call('ZADD', QUEUE, due, id)
local own = key('instance_timers', owner)
local first = tonumber(redis.call('ZRANGE', own, 0, 0, 'WITHSCORES')[2])
redis.call('ZADD', own, due, id)
if not first or tonumber(due) < first then -- else its owner wakes up for another timer before
  wake(owner)
  send_wake_ups()
end
return due
