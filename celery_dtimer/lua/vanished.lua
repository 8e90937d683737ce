-- Say which of the static timers that an instance's code declares are not there as they were written.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   ARGV[3] epoch   then per timer: id, revision, bytes of its definition, the last two ""
-- for one that the code declares wrongly
-- Returns per such timer: its id, and 1 it is gone, or its state can not be read, 2 its definition is gone, or another one, 3 it
-- is broken; or the number -1 when the epoch is over.
-- Worst case: O(timers of the call).

if not holds_epoch(ARGV[2], ARGV[3]) then
  return FENCED
end
local answer = {}
for i = 4, #ARGV, 3 do
  local id, revision, bytes = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  local row = fields(key('timer', id), 'status', 'revision', 'reason')
  local size = redis.pcall('STRLEN', key('timer_definition', id))
  local is_gone = type(size) == 'table' or size == 0
  if not row[1] or not row[2] then
    add(answer, id, 1)
  elseif bytes and row[1] ~= 'active' and row[1] ~= 'paused' and row[1] ~= 'stopped' then
    add(answer, id, 3)
  elseif bytes and row[3] ~= 'finished' and (is_gone or (row[2] == revision and size ~= bytes)) then
    add(answer, id, 2)
  end
end
return answer
