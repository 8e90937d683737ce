-- Note what became of a run in the worker, and end its lease, or keep it for a retry.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] task id   ARGV[3] timer id, "" when only RUNNING knows   ARGV[4] scheduled moment
-- ARGV[5] number   ARGV[6] shard   ARGV[7] retries   ARGV[8] state: succeeded, failed, retried, revoked, expired, ...
-- ARGV[9] the message that ran it   ARGV[10] ms that the lease is kept, "" to end it   ARGV[11] entries that the history keeps
-- ARGV[12] the worker   ARGV[13] ms that it took, "" when it did not run   ARGV[14] error or ""
-- ARGV[15..] fields and values of a dead letter, none when it has not failed for good
-- Returns 1, or 0 when it is not known, or another message of the run is being run: then the lease stays that one's.
-- Worst case: O(log runs that are out + triggers of the timer + size of its definition).

local task, message, keep = ARGV[2], ARGV[9], ARGV[10]
local timer, due, number_, shard, retries = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local known, known_due, known_number, known_shard, known_retries, resent, _, holder = lease_of(task)
if timer == '' then
  if not known then
    return 0
  end
  timer, due, number_, shard, retries, message = known, known_due, known_number, known_shard, known_retries, holder
end
local more = {'worker', ARGV[12]}
if ARGV[13] ~= '' then
  add(more, 'took', ARGV[13])
end
if ARGV[14] ~= '' then
  add(more, 'error', ARGV[14])
end
note_run(ARGV[11], task, timer, due, number_, shard, retries, ARGV[8], unpack(more))
if #ARGV > 14 then
  local definition = definition_to_keep(task, timer, due)
  bury_letter(task, definition, 'timer', timer, 'due', due, 'number', number_, 'shard', shard, 'task_id', task, 'retries',
    retries, 'where', ARGV[12], 'error', ARGV[14], unpack(ARGV, 15))
elseif not known and ARGV[8] == 'succeeded' then
  drop_letter(task) -- it was taken for lost, and went on
end
local is_earlier = known and tonumber(retries) < tonumber(known_retries)
if is_earlier or (holder and not is_idle(holder) and holder ~= message) then
  return 0
elseif keep == '' then
  close_run(task, timer)
  if #ARGV <= 14 then -- else its letter may need it
    cut_definition(timer, due)
  end
elseif known then
  local try = whole(tonumber(retries) + (ARGV[8] == 'retried' and 1 or 0)) -- a duplicate of the one before is no retry
  redis.call('HSET', RUNNING, task, lease_text(timer, due, number_, shard, try, resent, 0, '-'))
  keep_lease(task, timer, NOW + tonumber(keep), 0)
end
send_wake_ups()
return 1
