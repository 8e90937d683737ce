-- Delete static timers that no live instance of their source declares any more.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id of the caller   ARGV[3] epoch   ARGV[4] source   ARGV[5..] timer ids
-- Returns the ids that were deleted, or -1 when the epoch is over. While an instance has not declared yet nothing is deleted.
-- Worst case: O(timers of the call * (instances + log timers)).

check_types()
local source = ARGV[4]
if not holds_epoch(ARGV[2], ARGV[3]) then
  return FENCED
end
local declarations = {}
for _, instance in ipairs(registered()) do
  local row = fields(key('instance', instance.id), 'source', 'declaration')
  if not row[2] then
    return {}
  elseif row[1] == source then
    declarations[key('declaration', row[2])] = true
  end
end
local deleted = {}
for i = 5, #ARGV do
  local declared = false
  for declaration in pairs(declarations) do
    declared = declared or redis.call('SISMEMBER', declaration, ARGV[i]) == 1
  end
  if not declared then
    if fields(key('timer', ARGV[i]), 'source')[1] == source then
      erase_family(ARGV[i])
      table.insert(deleted, ARGV[i])
    end
    redis.call('SREM', key('static_timers', source), ARGV[i])
  end
end
return deleted
