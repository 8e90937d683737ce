-- Delete timers with their pending triggers.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2..] timer ids
-- Returns 1 for each timer that was there, 0 for one that was not.
-- Worst case: O(instances + timers of the call and their triggers * log timers).

check_types()
local answer = {}
for i = 2, #ARGV do
  local there = redis.call('EXISTS', key('timer', ARGV[i])) == 1
  if there then
    erase_family(ARGV[i])
  end
  table.insert(answer, there and 1 or 0)
end
return answer
