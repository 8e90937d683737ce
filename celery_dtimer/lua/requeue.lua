-- Send what a dead letter holds once more: as a hidden one-shot, or a durable countdown, in place of the letter.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] id of the letter   ARGV[3] id of the one-shot   ARGV[4] id of the timer that it belongs to, or ""
-- ARGV[5] revision   ARGV[6] definition   ARGV[7] task id of what it sends, when that is one message, else ""
-- The definition is kept for a week under that task id, for the case that this run comes to a letter too.
-- Returns 1, or 0 when there is no such letter.
-- Worst case: O(instances + log timers + log letters + size of the definition).

check_types()
local KEPT_MS = 7 * 86400000
local letter = ARGV[2]
if not drop_letter(letter) then
  return 0
end
add_hidden(ARGV[3], ARGV[4], ARGV[5], ARGV[6])
if ARGV[7] ~= '' then
  redis.call('HSET', key('dead_timer', ARGV[7]), 'definition', ARGV[6])
  redis.call('PEXPIRE', key('dead_timer', ARGV[7]), KEPT_MS)
end
send_wake_ups()
return 1
