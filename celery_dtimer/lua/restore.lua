-- Write definitions again that are gone, or were edited, of timers whose states say which they are.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   ARGV[3] epoch   then per timer: id, revision, definition
-- Returns for each 1 when it was written, 0 when there is no timer of that revision: then nothing was; or the number -1 when the
-- epoch is over.
-- Worst case: O(timers of the call), and their definitions.

if not holds_epoch(ARGV[2], ARGV[3]) then
  return FENCED
end
local answer, restored = {}, 0
for i = 4, #ARGV, 3 do
  local is_it = fields(key('timer', ARGV[i]), 'revision')[1] == ARGV[i + 1]
  if is_it then
    redis.call('SET', key('timer_definition', ARGV[i]), ARGV[i + 2])
    restored = restored + 1
  end
  answer[#answer + 1] = is_it and 1 or 0
end
if restored > 0 then
  count('repaired', restored)
end
return answer
