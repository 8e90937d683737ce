-- Send what a dead letter holds once more: as a hidden one-shot, or a durable countdown, in place of the letter.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] id of the letter   ARGV[3] id of the one-shot   ARGV[4] id of the timer that it belongs to, or ""
-- ARGV[5] revision   ARGV[6] definition
-- Returns 1, or 0 when there is no such letter.
-- Worst case: O(instances + log timers + log letters + size of the definition).

local letter = ARGV[2]
if not drop_letter(letter) then
  return 0
end
add_hidden(ARGV[3], ARGV[4], ARGV[5], ARGV[6])
send_wake_ups()
return 1
