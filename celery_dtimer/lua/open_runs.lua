-- Note runs that are about to be sent, for timers that hold their runs; say of each whether it may go.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   ARGV[3] epoch   ARGV[4] ms within which a worker is to start one
-- then per run: timer id, scheduled moment, number, overlap of its timer, how often it was sent again, task ids of its
-- messages with blanks in between
-- Returns for each run: "open" it may go and is noted, "busy" another is out, or "cancel" and the task ids of the other runs
-- that are out, with blanks in between: it may go, is noted, and they are to be revoked.
-- Returns the number -1 when the epoch is over.
-- A run that is noted already may go, and its time counts anew.
-- Worst case: O(messages of the runs * log runs that are out).

local answer = {}
if not holds_epoch(ARGV[2], ARGV[3]) then
  return FENCED
end
local expiry = NOW + tonumber(ARGV[4])
for i = 5, #ARGV, 6 do
  local timer, due, number_, overlap, resent = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  local open, own, tasks = key('open_runs', timer), {}, {}
  for task in string.gmatch(ARGV[i + 5], '%S+') do
    own[task] = true
    tasks[#tasks + 1] = task
  end
  redis.pcall('ZREMRANGEBYSCORE', open, '-inf', whole(NOW))
  local others = overlap ~= 'allow' and others_out(timer, own) or {}
  if #others > 0 and overlap ~= 'cancel_other' then
    answer[#answer + 1] = 'busy'
  else
    local texts, scores = {}, {} -- for one call each: calls are what a script's time goes into
    for shard, task in ipairs(tasks) do
      local holder = select(8, lease_of(task))
      if not holder or is_idle(holder) then
        add(texts, task, lease_text(timer, due, number_, shard - 1, 0, resent, 0, '-' .. ARGV[2]))
        add(scores, whole(expiry), task)
      end
    end
    if #texts > 0 then
      redis.pcall('HSET', RUNNING, unpack(texts))
      redis.pcall('ZADD', RUN_LEASES, unpack(scores))
      redis.pcall('ZADD', open, unpack(scores))
    end
    answer[#answer + 1] = #others > 0 and 'cancel ' .. table.concat(others, ' ') or 'open'
  end
end
return answer
