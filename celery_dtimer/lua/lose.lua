-- Mark a run whose lease has ended as lost; send it again, or put it among the dead letters.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   ARGV[3] epoch   ARGV[4] task id   ARGV[5] what RUNNING says of it
-- ARGV[6] id of the hidden one-shot that sends it again, "" for a dead letter   ARGV[7] the run's claim
-- ARGV[8] entries that the history keeps   ARGV[9] why it is lost   ARGV[10] name of the timer
-- Returns 1 lost, 2 lost and sent again, 0 not lost (any more), or -1 when the epoch is over.
-- It is sent again as it was, or not at all; its letter says by a revision which definition sends it.
-- Worst case: O(instances + log timers + triggers of the timer + size of the definition).

check_types()
local task, again = ARGV[4], ARGV[6]
if not holds_epoch(ARGV[2], ARGV[3]) then
  return FENCED
end
local expiry = redis.call('ZSCORE', RUN_LEASES, task)
if not expiry or tonumber(expiry) > NOW or (redis.call('HGET', RUNNING, task) or '') ~= ARGV[5] then
  return 0
end
local timer, due, number_, shard, retries = lease_of(task)
if not timer then -- edited by hand
  drop_lease(task)
  return 0
end
local sending, revision = sending_of(task, timer, due)
note_run(ARGV[8], task, timer, due, number_, shard, retries, 'lost', 'error', ARGV[9])
count('lost', 1)
close_run(task, timer)
local code = 1
if again ~= '' and sending then
  redis.call('DEL', key('run_claim', ARGV[7]))
  add_hidden(again, timer, fields(key('timer', timer), 'revision')[1] or '-', sending, 'due', due, 'runs',
    whole(tonumber(number_) - 1))
  code = 2
else
  local definition = definition_to_keep(task, timer, due)
  bury_letter(task, definition, 'timer', timer, 'name', ARGV[10], 'due', due, 'number', number_, 'shard', shard, 'task_id',
    task, 'retries', retries, 'reason', 'lost', 'error', ARGV[9], 'where', '', 'revision', revision or '-')
end
send_wake_ups()
return code
