-- Cancel durable countdowns: remove all that is stored of them.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2..] ids of countdowns
-- Returns for each a code and its definition, "" when there is none. Codes:
--   1 it is never sent, 2 its owner may be publishing it just now (with confirmed dispatch), 0 there is none, or it was sent:
--   then nothing was written.
-- Worst case: O(instances + countdowns of the call * log timers).

check_types()
local answer = {}
for i = 2, #ARGV do
  local id = ARGV[i]
  local row = fields(key('timer', id), 'owner', 'due', 'last_sent', 'revision')
  local code, definition = 0, ''
  if row[4] and not (row[3] and row[3] == row[2]) then
    code = in_flight(id, row[1]) and 2 or 1
    local found = redis.pcall('GET', key('timer_definition', id))
    definition = type(found) == 'string' and found or ''
    erase(id)
  end
  add(answer, code, definition)
end
return answer
