-- Write timers with the states that an export has told: those that are new here, or as they were read.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""
-- ARGV[2] with blanks in between: ms that a timer without a run left is kept, how many timers there may be or "-" for any
--   number, 1 when the export is of this very service's data, else 0
-- then per timer:
--   "<id> <the only moment that it runs at, or -> <1 for a pending call, else 0>"
--   what was read of it: "" nothing, else "<revision> <status> <created> <due> <last run> <last sent>", "-" where there is none
--   definition, "" to leave the one that is there   number of fields and values of its hash, these
-- Returns for each
--   1  it was written
--   2  its owner may be publishing it just now: ask again
--   3  it runs once, has come with an import before or may have been sent or cancelled since the export, and is not there:
--      it does not come again
--   its hash as a list, empty when there is none: it is not as it was read
-- Of all but the first nothing was written. The number -4: there would be too many timers; nothing was written at all.
-- What runs once is remembered in `arrivals` for 30 days.
-- Worst case: O(instances + timers of the call * (fields + log timers)).

local ARRIVALS = key('arrivals')
local REMEMBERED_MS = 30 * 86400000
check_types()
redis.call('ZCARD', ARRIVALS)
local keep, most, is_origin = string.match(ARGV[2], '^(%d+) (%S+) ([01])$')
local choose = placement(candidates())
local rows, position, created = {}, 3, 0
while position <= #ARGV do
  local id, moment, is_call = string.match(ARGV[position], '^(%S+) (%S+) ([01])$')
  local first = position + 4
  local last = first + tonumber(ARGV[position + 3]) - 1
  rows[#rows + 1] = {id = id, moment = moment, is_call = is_call == '1', read = ARGV[position + 1],
    definition = ARGV[position + 2], first = first, last = last}
  if ARGV[position + 1] == '' and redis.call('EXISTS', key('timer', id)) == 0 then
    created = created + 1
  end
  position = last + 1
end
if created > 0 and most ~= '-' then
  local there = redis.call('ZCARD', QUEUE) + redis.call('ZCARD', INACTIVE)
  if there + created > tonumber(most) then
    return FULL
  end
end

-- Says whether what runs once has been here, or may have run where the export was made.
local function has_been(row)
  if row.moment == '-' then
    return false
  end
  local is_past = row.is_call or tonumber(row.moment) <= NOW
  return is_origin == '1' and is_past or redis.call('ZSCORE', ARRIVALS, 'imported:' .. row.id .. ':' .. row.moment)
end

local function as_read(found)
  if not found[1] and not found[2] then
    return ''
  end
  for i = 1, 6 do
    found[i] = found[i] or '-'
  end
  return table.concat(found, ' ', 1, 6)
end

local queued, owned, definitions = {}, {}, {}

local function write(row, owner, source)
  local id, name, new = row.id, key('timer', row.id), {}
  for i = row.first, row.last, 2 do
    new[ARGV[i]] = ARGV[i + 1]
  end
  if row.read ~= '' then
    unschedule(id, owner)
    redis.call('ZREM', INACTIVE, id)
    redis.call('DEL', name)
  end
  if row.definition ~= '' then
    add(definitions, key('timer_definition', id), row.definition)
  end
  if new.status == 'active' then
    owner = still_there(owner) or choose()
    redis.call('HSET', name, 'owner', owner, unpack(ARGV, row.first, row.last))
    add(queued, new.at, id)
    give(owned, id, new.at, owner)
  else
    redis.call('HSET', name, unpack(ARGV, row.first, row.last))
    local is_over = new.status == 'stopped' and (new.reason == 'finished' or new.reason == 'ended') and not new.source
    redis.call('ZADD', INACTIVE, is_over and whole(NOW + keep) or '+inf', id)
  end
  if source and source ~= new.source then
    redis.pcall('SREM', key('static_timers', source), id)
  end
  if new.source then
    redis.pcall('SADD', key('static_timers', new.source), id)
  end
  if row.moment ~= '-' then
    redis.call('ZADD', ARRIVALS, whole(NOW + REMEMBERED_MS), 'imported:' .. id .. ':' .. row.moment)
  end
end

local answer = {}
for i, row in ipairs(rows) do
  local name = key('timer', row.id)
  local found = fields(name, 'revision', 'status', 'created', 'due', 'last_run', 'last_sent', 'owner', 'source')
  local owner, source = found[7], found[8]
  if as_read(found) ~= row.read then
    local hash = redis.pcall('HGETALL', name)
    answer[i] = hash.err and {} or hash
  elseif row.read == '' and has_been(row) then
    answer[i] = 3
  elseif found[2] == 'active' and in_flight(row.id, owner) and is_at_work(owner) then
    answer[i] = 2
  else
    write(row, owner, source)
    answer[i] = 1
  end
end
write_out(definitions, queued, owned)
redis.call('ZREMRANGEBYSCORE', ARRIVALS, '-inf', whole(NOW - 600000))
send_wake_ups()
return answer
