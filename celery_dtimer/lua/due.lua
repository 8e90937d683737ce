-- Read up to ARGV[4] due timers of one instance, in the order of their time.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   ARGV[3] epoch   ARGV[4] limit
-- Returns {now, last heartbeat of the instance, time of the next timer after these or -1, then per timer one text with
-- blanks in between: id, status, revision, created, due, runs, last_sent, attempts, parent}, or -1 when the epoch is over.
-- What is not there is "-"; a timer whose hash is gone, or is something else, has "-" for status. One whose hash names
-- another owner was edited by hand: it is dropped here, so that it is not sent twice.
-- Worst case: O(limit * log timers).

local id, limit = ARGV[2], tonumber(ARGV[4])
if not holds_epoch(id, ARGV[3]) then
  return FENCED
end
local own = key('instance_timers', id)
local ids = redis.call('ZRANGEBYSCORE', own, '-inf', whole(NOW), 'LIMIT', 0, limit)
local following = redis.call('ZRANGE', own, #ids, #ids, 'WITHSCORES')[2]
local answer = {NOW, tonumber(redis.call('ZSCORE', INSTANCES, id)), following and tonumber(following) or -1}
for _, timer in ipairs(ids) do
  local row = fields(key('timer', timer), 'status', 'revision', 'created', 'due', 'runs', 'last_sent', 'attempts',
    'parent', 'owner')
  if row[1] == 'active' and row[9] ~= id then
    redis.call('ZREM', own, timer)
  else
    for i = 1, 8 do
      row[i] = row[i] or '-'
    end
    answer[#answer + 1] = timer .. ' ' .. table.concat(row, ' ', 1, 8)
  end
end
return answer
