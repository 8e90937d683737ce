-- Shared by every script; it is put in front of each.
--
-- Every script declares two keys. KEYS[1] is meta:{service}; all others are built from it by key(), inside the same hash
-- tag. KEYS[2] is never:{service}, which never exists: while a Cluster slot moves, the server then answers TRYAGAIN
-- instead of showing half of the keys as missing.
--
-- A script is isolated, not rolled back: it reads and checks before its first write. User data is opaque here.
-- Moments are whole milliseconds of the server's clock; ARGV[1] of every script is such a moment given by a test, or "".
--
-- A service may be split into shards, each with all of these keys (but for what layout.lua tells, which the service's own
-- meta has). Calls that must reach the right one give the number of the layout that they go by behind an "@" in ARGV[1]:
-- a shard that knows a newer one answers -9 and writes nothing.

local PREFIX, TAG = string.match(KEYS[1], '^(.-)meta:({[^}]*})$')
local UNASSIGNED = 'unassigned'
local FENCED, BUSY, UNLINKED, FULL, ELSEWHERE = -1, -2, -3, -4, -9
local GIVEN_NOW, GIVEN_LAYOUT = string.match(ARGV[1], '^(%d*)@?(%d*)$')
local DAMAGED = 'damaged: ' -- begins the reason of a timer that is broken because of what was edited, not of what it is
local LAST_MS = 253402300799999 -- the last moment that can be shown, in the year 9999

local function key(what, id)
  if id then
    return PREFIX .. what .. ':' .. TAG .. ':' .. id
  end
  return PREFIX .. what .. ':' .. TAG
end

local META = KEYS[1]

-- What is stored may be of a newer schema than SCHEMA, which is the caller's: then it is left alone, in every script. (META may
-- have been edited into something else, which mend.lua removes.)
local function stored_schema()
  local found = redis.pcall('HGET', META, 'schema')
  return type(found) == 'string' and tonumber(found) or 0
end

if stored_schema() > SCHEMA then
  return redis.error_reply('SCHEMA ' .. string.format('%.0f', stored_schema()))
end

local QUEUE = key('timer_queue')
local INSTANCES = key('service_instances')
local INACTIVE = key('inactive_timers')
local HISTORY = key('history')
local RUNS = key('runs')
local RUNNING = key('running')
local RUN_LEASES = key('run_leases')
local REVOKED = key('revoked_runs')
local DEAD = key('dead_timers')
local COUNTERS = key('counters')

local function whole(number)
  return string.format('%.0f', number)
end

-- A field's number; the default when it is not there, or was edited into something else: no script writes a larger one.
local MOST = 2 ^ 53

local function number(text, default)
  local found = tonumber(text)
  return found and found >= -MOST and found <= MOST and found or default
end

-- A moment that can be shown, whatever a score was edited into.
local function moment_of(score)
  return math.max(0, math.min(number(score, 0), LAST_MS))
end

-- Now in ms, and the microseconds since.
local function server_time()
  if GIVEN_NOW ~= '' then
    return tonumber(GIVEN_NOW), 0
  end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000), time[2] % 1000
end

local NOW, MICROS = server_time()

-- Raise Redis' own error when what nearly every transition writes to is of another type: before a first write, not half way.
local function check_types()
  redis.call('ZCARD', QUEUE)
  redis.call('ZCARD', INACTIVE)
  redis.call('ZCARD', key('instance_timers', UNASSIGNED))
  for _, id in ipairs(redis.call('ZRANGE', INSTANCES, 0, -1)) do
    redis.call('ZCARD', key('instance_timers', id))
  end
end

-- Says whether a timer is a durable countdown: nothing is left of it, in the history neither, once it was sent.
local function is_countdown(id)
  return string.sub(id, 1, 4) == 'eta-'
end

-- The named fields of a hash; all false when the key is missing or of another type.
local function fields(name, ...)
  local values = redis.pcall('HMGET', name, ...)
  if values.err then
    values = {}
    for i = 1, select('#', ...) do
      values[i] = false
    end
  end
  return values
end

if GIVEN_LAYOUT ~= '' and number(fields(META, 'layout_here')[1], 0) > tonumber(GIVEN_LAYOUT) then
  return ELSEWHERE
end

-- What ARRIVALS knows something by that has come from another shard: it may go and come again, in another layout.
local function arrival(id)
  return GIVEN_LAYOUT .. ':' .. id
end

-- A field's number of shards; nothing when it is not there, or was edited into what no service has.
local function shards_in(text)
  local found = number(text, 0)
  return found >= 1 and found <= MOST_SHARDS and found % 1 == 0 and found or nil
end

-- The numbers of shards that a service has ever had, with one more.
local function seen_with(seen, shards)
  if not seen then
    return shards
  end
  return string.find(' ' .. seen .. ' ', ' ' .. shards .. ' ', 1, true) and seen or seen .. ' ' .. shards
end

-- The layout of the service: see layout.lua.
local function layout()
  local row = fields(META, 'shards', 'shards_wanted', 'layout', 'shards_seen')
  local shards = shards_in(row[1]) or 1
  return {shards, shards_in(row[2]) or 0, number(row[3], 0), seen_with(row[4], whole(shards))}
end

-- Says whether the instance is registered with this epoch.
local function holds_epoch(id, epoch)
  return fields(key('instance', id), 'epoch')[1] == epoch
    and redis.call('ZSCORE', INSTANCES, id) and true
end

-- The registered instances with the moment of their last heartbeat, oldest first.
local function registered()
  local found, rows = {}, redis.call('ZRANGE', INSTANCES, 0, -1, 'WITHSCORES')
  for i = 1, #rows, 2 do
    local row = fields(key('instance', rows[i]), 'status', 'heartbeat_interval', 'instance_timeout', 'broker')
    table.insert(found, {
      id = rows[i],
      heartbeat = tonumber(rows[i + 1]),
      status = row[1],
      interval = number(row[2], 5000),
      timeout = number(row[3], 30000),
      broker = row[4],
    })
  end
  return found
end

-- Says whether the owner of a timer has read it, and may be publishing its run.
local function in_flight(id, owner)
  local ids = owner and fields(key('instance', owner), 'in_flight')[1]
  return ids and string.find(' ' .. ids .. ' ', ' ' .. id .. ' ', 1, true)
end

-- Says whether an instance of an id may be at work: not when it is dead.
local function is_at_work(id)
  local heartbeat = id and redis.call('ZSCORE', INSTANCES, id)
  local timeout = number(fields(key('instance', id or ''), 'instance_timeout')[1], 30000)
  return heartbeat and NOW - tonumber(heartbeat) <= timeout
end

-- Says whether an instance was heard within its timeout.
local function is_heard(instance)
  return NOW - instance.heartbeat <= instance.timeout
end

-- The instances that may be given timers, with their loads and what they say of their broker: the best kind that lives.
-- A broker that is down counts more than a late heartbeat: those heard within two intervals come first, then those within
-- the timeout, then the same two kinds of those whose broker is down. Those that are drained come last: timers go to them
-- rather than to nobody. One instance may be left out.
local function candidates(left_out)
  local kinds = {{}, {}, {}, {}, {}, {}, {}, {}}
  for _, instance in ipairs(registered()) do
    local is_drained = instance.status == 'draining'
    if (instance.status == 'active' or is_drained) and instance.id ~= left_out and is_heard(instance) then
      instance.load = redis.call('ZCARD', key('instance_timers', instance.id))
      local is_late = NOW - instance.heartbeat > 2 * instance.interval
      local kind = 1 + (is_late and 1 or 0) + (instance.broker == 'down' and 2 or 0) + (is_drained and 4 or 0)
      table.insert(kinds[kind], instance)
    end
  end
  for _, found in ipairs(kinds) do
    if #found > 0 then
      return found
    end
  end
  return {}
end

-- A function that answers the instance with the fewest timers, counting what it has given out itself.
local function placement(found)
  return function()
    local best
    for _, instance in ipairs(found) do
      if not best or instance.load < best.load then
        best = instance
      end
    end
    if not best then
      return UNASSIGNED
    end
    best.load = best.load + 1
    return best.id
  end
end

-- What happened to runs, for the history: lines of what was sent and of what was not.
local sent, skipped = {}, {}

-- Note a run that was sent: id of the timer, its scheduled moment, its number or 'trigger'.
local function note_sent(id, due, number)
  sent[#sent + 1] = id .. ' ' .. due .. ' ' .. number
end

-- Add to a field of a hash; answers the sum. A count that was edited into something else begins anew, and holds nothing up.
local function add_to(name, field, by)
  local sum = redis.pcall('HINCRBY', name, field, by)
  if type(sum) == 'table' then
    redis.pcall('HSET', name, field, by)
    return tonumber(by)
  end
  return sum
end

-- Count something in the service.
local function count(what, by)
  add_to(COUNTERS, what, by)
end

-- Count runs in a row that do not happen, in their timer and in the service: scheduled from a moment until another.
local function note_skipped(id, reason, runs, first, last)
  add_to(key('timer', id), 'skipped_' .. reason, runs)
  count('skipped_' .. reason, runs)
  skipped[#skipped + 1] = table.concat({id, reason, runs, first, last}, ' ')
end

-- The same for runs that a user's doing has passed over. Should one of them be out already, its late commit leaves it so.
local function note_passed(id, reason, runs, first, last)
  note_skipped(id, reason, runs, first, last)
  redis.call('HSET', key('timer', id), 'passed', last)
end

-- An id for the next entry of a stream: by the server's clock, or by a test's.
local function entry_id(stream)
  if GIVEN_NOW == '' then
    return '*'
  end
  local last = redis.pcall('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  local ms, number = string.match(last and last[1] or '0-0', '^(%d+)-(%d+)$')
  ms = tonumber(ms)
  return ms >= NOW and whole(ms) .. '-' .. whole(number + 1) or whole(NOW) .. '-1'
end

-- Write what was noted into the history, of `cap` entries (about); nothing when that is 0. An entry has up to so many
-- lines. It holds nothing up either.
local HISTORY_LINES = 20

local function write_history(instance, cap)
  if cap == '0' then
    return
  end
  for what, lines in pairs({sent = sent, skipped = skipped}) do
    for from = 1, #lines, HISTORY_LINES do
      local text = table.concat(lines, '\n', from, math.min(from + HISTORY_LINES - 1, #lines))
      redis.pcall('XADD', HISTORY, 'MAXLEN', '~', cap, entry_id(HISTORY), 'instance', instance, what, text)
    end
  end
end

-- Note that this server lacks what an instance knows to have been confirmed: another one has failed over to it, or it came
-- back without its last writes. What was sent since the moment `from`, of which it knows, may be sent again.
local function note_replay(id, from, cap)
  local instance, until_ms = key('instance', id), whole(math.max(NOW, from))
  add_to(instance, 'replays', 1)
  redis.call('HSET', instance, 'replayed_from', whole(from), 'replayed_until', until_ms)
  if cap ~= '0' then
    redis.pcall('XADD', HISTORY, 'MAXLEN', '~', cap, entry_id(HISTORY), 'instance', id, 'replayed',
      whole(from) .. ' ' .. until_ms)
  end
end

-- The newest moment of which this server knows that an instance has written something.
local function last_known(id)
  local row = fields(key('instance', id), 'heartbeat_at', 'committed_at')
  return math.max(number(row[1], 0), number(row[2], 0))
end

local woken = {}

-- Remember to wake an instance; a wake-up is a hint, a safety check stands behind it.
local function wake(id)
  if id ~= UNASSIGNED then
    woken[id] = true
  end
end

local function send_wake_ups()
  for id in pairs(woken) do
    redis.call('PUBLISH', key('wake', id), '')
  end
end

-- Append two values to a list: a score and a member, for one ZADD of many. Calls are what a script's time goes into.
local function add(list, one, two)
  local count = #list
  list[count + 1], list[count + 2] = one, two
end

-- Note in `given` that a timer goes to an instance; hand_out() puts all of them there.
local function give(given, id, at, owner)
  given[owner] = given[owner] or {}
  add(given[owner], at, id)
end

local function hand_out(given)
  for owner, list in pairs(given) do
    redis.call('ZADD', key('instance_timers', owner), unpack(list))
    wake(owner)
  end
end

-- Store what many timers have gathered: definitions by their keys, when they are looked at, and who has them.
local function write_out(definitions, queued, owned)
  if #definitions > 0 then
    redis.call('MSET', unpack(definitions))
  end
  if #queued > 0 then
    redis.call('ZADD', QUEUE, unpack(queued))
  end
  hand_out(owned)
end

-- Give an active timer to an instance.
local function assign(id, at, owner)
  redis.call('ZADD', key('instance_timers', owner), at, id)
  redis.call('HSET', key('timer', id), 'owner', owner)
  wake(owner)
end

-- The owner if it is still registered, or nil.
local function still_there(owner)
  if owner and (owner == UNASSIGNED or redis.call('ZSCORE', INSTANCES, owner)) then
    return owner
  end
end

-- Take a timer out of the queue and from its owner.
local function unschedule(id, owner)
  redis.call('ZREM', QUEUE, id)
  redis.pcall('ZREM', key('instance_timers', owner or UNASSIGNED), id)
end

-- Put an existing timer aside: paused, stopped or broken.
local function set_aside(id, owner, status, reason)
  unschedule(id, owner)
  redis.call('HSET', key('timer', id), 'status', status, 'reason', reason)
  redis.call('HDEL', key('timer', id), 'owner', 'attempts')
  redis.call('ZADD', INACTIVE, '+inf', id)
end

-- A run that is out has a lease: a member of RUN_LEASES by when it ends. RUNNING says of it, with blanks in between:
--   id of the timer, scheduled moment, number, shard, retries, how often it was sent again, the moment it is to be back by
--   or 0, which message is running it or, while none is, "-" and the instance that has noted it
-- A timer that holds its runs has them in open_runs too, by the same moment. None of these keys, edited into something
-- else, stops what matters more.
local LEASE = '^(%S+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%S+)$'

-- What RUNNING says of a run: nothing when it is not out.
local function lease_of(task)
  local text = redis.pcall('HGET', RUNNING, task)
  return string.match(type(text) == 'string' and text or '', LEASE)
end

-- What RUNNING is to say of a run: the values of LEASE.
local function lease_text(...)
  return table.concat({...}, ' ')
end

local function is_idle(holder)
  return string.sub(holder or '', 1, 1) == '-'
end

-- Let a lease go on, until the run is to be back at the latest.
local function keep_lease(task, timer, expiry, deadline)
  if deadline > 0 then
    expiry = math.min(deadline, expiry)
  end
  redis.call('ZADD', RUN_LEASES, whole(expiry), task)
  redis.pcall('ZADD', key('open_runs', timer), 'XX', whole(expiry), task)
end

local function put_lease(task, expiry, text)
  redis.call('HSET', RUNNING, task, text)
  redis.call('ZADD', RUN_LEASES, expiry, task)
end

local function drop_lease(task)
  redis.pcall('HDEL', RUNNING, task)
  redis.pcall('ZREM', RUN_LEASES, task)
end

-- Let a timer, and its triggers, that wait for the end of a run be looked at now.
local function end_waiting(timer)
  local ids = redis.pcall('SMEMBERS', key('triggers', timer))
  ids = ids.err and {} or ids
  ids[#ids + 1] = timer
  for _, id in ipairs(ids) do
    local row = fields(key('timer', id), 'status', 'owner', 'attempts')
    if row[1] == 'active' and row[2] and row[3] == 'waits' then
      redis.call('HSET', key('timer', id), 'at', whole(NOW)) -- by which lists that were edited are put right
      redis.pcall('ZADD', QUEUE, whole(NOW), id)
      redis.pcall('ZADD', key('instance_timers', row[2]), whole(NOW), id)
      wake(row[2])
    end
  end
end

-- End the lease of a run.
local function close_run(task, timer)
  drop_lease(task)
  if redis.pcall('ZREM', key('open_runs', timer), task) == 1 then
    end_waiting(timer)
  end
end

-- Runs of a timer that are out, so many at most, and the moment at which the first lease of them ends. `own` are left out.
local MOST_RUNS = 1000

local function others_out(timer, own)
  local found, first = {}, math.huge
  local rows = redis.pcall('ZRANGEBYSCORE', key('open_runs', timer), '(' .. whole(NOW), '+inf', 'WITHSCORES', 'LIMIT',
    0, MOST_RUNS + 1)
  for i = 1, rows.err and 0 or #rows, 2 do
    if not own[rows[i]] then
      found[#found + 1] = rows[i]
      first = math.min(first, tonumber(rows[i + 1]))
    end
  end
  return found, first
end

-- Forget the first runs of a timer that were noted and not started yet: others are found to be lost in time.
local function drop_open_runs(timer)
  local open = key('open_runs', timer)
  local tasks = redis.pcall('ZRANGE', open, 0, MOST_RUNS)
  for _, task in ipairs(tasks.err and {} or tasks) do
    if is_idle(select(8, lease_of(task))) then
      drop_lease(task)
    end
  end
  redis.call('DEL', open)
end

-- Write what became of a run into the history of runs, of `cap` entries (about). It holds nothing up.
local function note_run(cap, task, timer, due, number, shard, retries, state, ...)
  if cap ~= '0' then
    redis.pcall('XADD', RUNS, 'MAXLEN', '~', cap, entry_id(RUNS), 'task_id', task, 'timer', timer, 'due', due,
      'number', number, 'shard', shard, 'retries', retries, 'state', state, ...)
  end
end

-- Take a letter from the dead ones; answers whether it was there.
local function drop_letter(id)
  redis.call('DEL', key('dead_timer', id))
  return redis.pcall('ZREM', DEAD, id) == 1
end

-- Put a letter among the dead ones, of which the newest are kept: fields and values, and the definition that is sent for
-- it, "" when that is the timer's.
local DEAD_LETTERS = 10000

local function bury_letter(id, definition, ...)
  local added = redis.pcall('ZADD', DEAD, whole(NOW), id)
  if type(added) == 'table' then
    return -- it was edited into something else
  end
  local letter = key('dead_timer', id)
  redis.call('DEL', letter)
  redis.call('HSET', letter, ...)
  if definition ~= '' then
    redis.call('HSET', letter, 'definition', definition)
  end
  local surplus = redis.call('ZCARD', DEAD) - DEAD_LETTERS
  if surplus > 0 then
    for _, old in ipairs(redis.call('ZRANGE', DEAD, 0, surplus - 1)) do
      redis.call('DEL', key('dead_timer', old))
    end
    redis.call('ZREMRANGEBYRANK', DEAD, 0, surplus - 1)
  end
end

-- What sends a run of a timer once more: a definition that was kept for this very run, because a letter had held it, or the
-- timer's, with its revision. Nothing when the timer may have been another one when the run was sent: it was changed, or
-- created again, after the run's moment.
local function sending_of(task, timer, due)
  local kept = fields(key('dead_timer', task), 'definition')[1]
  if kept then
    return kept, ''
  end
  local row = fields(key('timer', timer), 'revision', 'created', 'last_run', 'changed')
  local is_same = row[1] and (row[3] == due or number(row[2], math.huge) <= tonumber(due))
    and number(row[4], 0) <= tonumber(due)
  local found = is_same and redis.pcall('GET', key('timer_definition', timer))
  if type(found) == 'string' then
    return found, row[1]
  end
end

-- What a letter of a run has to hold of a timer that has no run left, before that is cut.
local LONGEST_DEFINITION = 65536

local function definition_to_keep(task, timer, due)
  local found, revision = sending_of(task, timer, due)
  local is_kept = found and (revision == '' or fields(key('timer', timer), 'reason')[1] == 'finished')
  return is_kept and #found <= LONGEST_DEFINITION and found or ''
end

-- Cut the definition of a timer that has no run left, once its last run has ended.
local function cut_definition(timer, due)
  local row = fields(key('timer', timer), 'status', 'reason', 'last_run', 'summary')
  if row[4] and row[1] == 'stopped' and row[2] == 'finished' and row[3] == due then
    redis.call('SET', key('timer_definition', timer), row[4])
    redis.call('HDEL', key('timer', timer), 'summary')
  end
end

-- Create a hidden one-shot that is due at once, and goes with its commit; of a timer, or of none with "". Fields and values
-- of its hash may follow.
local function add_hidden(id, parent, revision, definition, ...)
  local now = whole(NOW)
  redis.call('HSET', key('timer', id), 'status', 'active', 'revision', revision, 'created', now, 'due', now, 'at', now, ...)
  redis.call('SET', key('timer_definition', id), definition)
  if parent ~= '' then
    redis.call('HSET', key('timer', id), 'parent', parent)
    redis.pcall('SADD', key('triggers', parent), id)
  end
  redis.call('ZADD', QUEUE, now, id)
  assign(id, now, placement(candidates())())
end

-- Remove all that is stored of a timer. A set that was edited into something else must not stop a script half way.
-- Its runs that were sent stay out if it goes because it has run.
local function erase(id, has_run)
  if not has_run and redis.call('EXISTS', key('open_runs', id)) == 1 then
    drop_open_runs(id)
  end
  local row = fields(key('timer', id), 'owner', 'parent', 'source')
  unschedule(id, row[1])
  redis.call('ZREM', INACTIVE, id)
  redis.call('DEL', key('timer', id), key('timer_definition', id))
  if row[2] then
    redis.pcall('SREM', key('triggers', row[2]), id)
  end
  if row[3] and row[3] ~= '' then
    redis.pcall('SREM', key('static_timers', row[3]), id)
  end
end

-- Remove a timer with its pending triggers.
local function erase_family(id)
  local triggers = redis.pcall('SMEMBERS', key('triggers', id))
  for _, trigger in ipairs(triggers.err and {} or triggers) do
    erase(trigger)
  end
  redis.call('DEL', key('triggers', id))
  erase(id)
end

-- Count a change of the membership; answers how many there were.
local function count_change()
  return add_to(META, 'members', 1)
end

-- Remove what is left of a timer whose hash is gone; set it aside as broken if something else is in the hash's place, or no
-- status in it. Whoever declares it writes it again.
local function bury(id)
  local timer = key('timer', id)
  local kind = redis.call('TYPE', timer).ok
  unschedule(id, UNASSIGNED)
  for _, instance in ipairs(registered()) do
    redis.call('ZREM', key('instance_timers', instance.id), id)
    local source = fields(key('instance', instance.id), 'source')[1]
    if source then
      redis.pcall('SREM', key('static_timers', source), id)
    end
  end
  if kind == 'none' or is_countdown(id) or fields(timer, 'parent')[1] then
    redis.call('ZREM', INACTIVE, id)
    redis.call('DEL', timer, key('timer_definition', id))
  else
    if kind ~= 'hash' then
      redis.call('DEL', timer)
    end
    local row = fields(timer, 'revision', 'created')
    redis.call('HSET', timer, 'revision', row[1] or '-', 'created', whole(number(row[2], NOW)))
    set_aside(id, nil, 'broken', DAMAGED .. (kind == 'hash' and 'its state had no status' or 'its state was a ' .. kind))
  end
  count_change()
end

-- Move timers, a list of ids and their times, from one instance to those that choose() answers. A member without an active
-- timer is dropped.
local function move(rows, source, choose)
  local gone, given = {}, {}
  for i = 1, #rows, 2 do
    local id, at = rows[i], rows[i + 1]
    local status = fields(key('timer', id), 'status')[1]
    gone[#gone + 1] = id
    if status == 'active' then
      local owner = choose()
      redis.call('HSET', key('timer', id), 'owner', owner)
      give(given, id, at, owner)
    elseif status then
      redis.call('ZREM', QUEUE, id)
    else
      bury(id)
    end
  end
  if #gone > 0 then
    redis.call('ZREM', source, unpack(gone))
  end
  hand_out(given)
end

-- Move up to `limit` timers, soonest due first, from one instance to those of `found`; answers how many left the source.
local function hand_over(from, found, limit)
  local source = key('instance_timers', from)
  local rows = redis.call('ZRANGE', source, 0, limit - 1, 'WITHSCORES')
  move(rows, source, placement(found))
  return #rows / 2
end

-- Raise the schema of what is stored to the newest that all registered instances read: what is older may join no more.
local function raise_schema()
  local lowest = math.huge
  for _, instance in ipairs(redis.call('ZRANGE', INSTANCES, 0, -1)) do
    lowest = math.min(lowest, number(fields(key('instance', instance), 'schema')[1], 0))
  end
  if lowest < math.huge and lowest > stored_schema() then
    redis.call('HSET', META, 'schema', whole(lowest))
  end
end

-- Forget a declaration, or false, that no instance has any more.
local function drop_declaration(declaration)
  if not declaration then
    return
  end
  for _, other in ipairs(redis.call('ZRANGE', INSTANCES, 0, -1)) do
    local row = fields(key('instance', other), 'declaration', 'declaring')
    if row[1] == declaration or row[2] == declaration then
      return
    end
  end
  redis.call('DEL', key('declaration', declaration))
end

-- Remove an instance that owns nothing any more.
local function forget(id)
  local declaration = fields(key('instance', id), 'declaration')[1]
  redis.call('ZREM', INSTANCES, id)
  redis.call('DEL', key('instance', id), key('instance_timers', id))
  count_change()
  raise_schema()
  drop_declaration(declaration)
end

-- Silence of everybody is no death: when the newest heartbeat is more than two intervals away from now, everybody gets
-- two intervals to be heard, unless it is leaving. Nobody's lease ends earlier than its holder counts on.
local function forgive_silence()
  local all = registered()
  local newest = all[#all]
  if newest and math.abs(NOW - newest.heartbeat) > 2 * newest.interval then
    for _, instance in ipairs(all) do
      local forgiven = NOW - instance.timeout + 2 * instance.interval
      if instance.status ~= 'leaving' and (instance.heartbeat < forgiven or instance.heartbeat > NOW) then
        redis.call('ZADD', INSTANCES, whole(forgiven), instance.id)
      end
    end
  end
end

-- The moment at which the first of the other instances is dead; 0 when timers wait for an owner, -1 when nobody else is there.
local function next_expiry(id)
  if redis.call('ZCARD', key('instance_timers', UNASSIGNED)) > 0 then
    return 0
  end
  local first = -1
  for _, other in ipairs(registered()) do
    local expiry = other.heartbeat + other.timeout
    if other.id ~= id and (first < 0 or expiry < first) then
      first = moment_of(expiry)
    end
  end
  return first
end

-- One instance moves timers at a time, for a second: twenty movers at once would stall the server's other clients.
-- A lock that lasts longer is from before the clock went back.
local MOVER_MS = 1000

local function may_move(id)
  local row = fields(META, 'mover', 'mover_until')
  local left = number(row[2], 0) - NOW
  return not row[1] or row[1] == id or left <= 0 or left > MOVER_MS
end

-- Why an instance may not move timers now: FENCED or BUSY, or nil.
local function hindrance(id, epoch)
  if not holds_epoch(id, epoch) then
    return FENCED
  end
  return not may_move(id) and BUSY or nil
end

-- Keep the mover while more is to be moved, and leave it to others after the last timer.
local function keep_mover(id, moved, more)
  if more == 1 then
    redis.call('HSET', META, 'mover', id, 'mover_until', whole(NOW + MOVER_MS))
  elseif moved > 0 then
    redis.call('HDEL', META, 'mover', 'mover_until')
  end
end

-- The other registered instances that own timers, with the moment of the first of them, the most overdue first.
local function heads(id)
  local found = {}
  for _, other in ipairs(redis.call('ZRANGE', INSTANCES, 0, -1)) do
    local at = other ~= id and redis.call('ZRANGE', key('instance_timers', other), 0, 0, 'WITHSCORES')[2]
    if at then
      table.insert(found, {id = other, at = tonumber(at)})
    end
  end
  table.sort(found, function(a, b)
    return a.at < b.at or (a.at == b.at and a.id < b.id)
  end)
  return found
end

-- The moment of the first timer of any other registered instance, or nil: the sign that one lags.
local function most_lagging(id)
  local first = heads(id)[1]
  return first and first.at
end

-- Read the due timers of an instance. `how` is a text of five numbers with blanks in between: how many are read at most;
-- how many more are told that come due within a second; 1 to note what is read as in flight, because it is published
-- before it is committed; 1 to look, when nothing is due, how other instances are getting on; how many are left out, which
-- were read before and are not committed yet (about: who asks leaves out what is told twice).
-- Answers a list of texts with blanks in between:
--   now, microseconds since, last heartbeat of the instance, 1 when more may be due, else 0 and
--   the time of the next timer after these or -1, time of the first timer of any other instance or -1 when that was not
--   looked up, how many of the timers come due later
--   then one per timer: id, status, revision, created, due, runs, last_sent, attempts, parent, time to look at it
-- A timer whose hash is gone, or is something else, has no status. Of one with blanks in its fields only the status is told,
-- and a member that can be no timer's id is dropped: nobody could name it. One whose hash names another owner was edited by
-- hand: it is dropped here, so that it is not sent twice. One that is not due yet by its hash gets its score anew: nothing
-- is early.
-- When more is due than is read, a quarter of the places goes to what came due last: a backlog does not hold up the timers
-- that are on time.
local AHEAD_MS = 1000
local IS_ID = '^[!-~]+$'
local LINE = '^[!-~]+' .. string.rep(' [!-~]*', 8) .. ' %d+$'

local function read_due(id, how)
  local limit, ahead, marks, looks, skip = string.match(how, '^(%d+) (%d+) (%d) (%d) (%d+)$')
  limit, ahead, skip = tonumber(limit), tonumber(ahead), tonumber(skip)
  skip = skip - math.floor(skip / 4) -- the rest of them came due last
  local own, now = key('instance_timers', id), whole(NOW)
  local ids = redis.call('ZRANGEBYSCORE', own, '-inf', now, 'LIMIT', skip, limit)
  local due, full, following = #ids, #ids == limit, -1
  local at = {}
  if full then
    local share = math.floor(limit / 4)
    local latest = redis.call('ZREVRANGEBYSCORE', own, now, '-inf', 'LIMIT', 0, share)
    for i = 1, limit - share do
      latest[share + i] = ids[i]
    end
    ids = latest
  else
    local first = due + skip
    local rows = redis.call('ZRANGE', own, first, first + math.max(ahead, 1) - 1, 'WITHSCORES')
    following = tonumber(rows[2] or -1)
    for i = 1, ahead > 0 and #rows or 0, 2 do
      if tonumber(rows[i + 1]) - NOW <= AHEAD_MS then
        ids[#ids + 1] = rows[i]
        at[#ids] = whole(tonumber(rows[i + 1]))
      end
    end
  end
  local lines, later = {''}, 0
  for i, timer in ipairs(ids) do
    local row = fields(key('timer', timer), 'status', 'revision', 'created', 'due', 'runs', 'last_sent', 'attempts',
      'parent', 'owner')
    local moment = tonumber(row[4])
    if not string.find(timer, IS_ID) then
      redis.call('ZREM', own, timer)
      redis.call('ZREM', QUEUE, timer)
    elseif row[1] == 'active' and row[9] ~= id then
      redis.call('ZREM', own, timer)
    elseif i <= due and row[1] == 'active' and moment and moment > NOW and moment <= LAST_MS then
      redis.call('HSET', key('timer', timer), 'at', whole(moment))
      redis.call('ZADD', QUEUE, whole(moment), timer)
      redis.call('ZADD', own, whole(moment), timer)
    else
      for field = 1, 8 do
        row[field] = row[field] or ''
      end
      local line = timer .. ' ' .. table.concat(row, ' ', 1, 8) .. ' ' .. (at[i] or now)
      if not string.find(line, LINE) then
        line = timer .. (row[1] == 'active' and ' active' or ' ') .. '        ' .. (at[i] or now)
      end
      lines[#lines + 1] = line
      later = later + (i > due and 1 or 0)
    end
  end
  if marks == '1' then
    redis.call('HSET', key('instance', id), 'in_flight', table.concat(ids, ' ', 1, due))
  else
    redis.call('HDEL', key('instance', id), 'in_flight')
  end
  local elsewhere = looks == '1' and due == 0 and most_lagging(id) or -1
  local heartbeat = moment_of(redis.call('ZSCORE', INSTANCES, id))
  lines[1] = string.format('%.0f %.0f %.0f %d %.0f %.0f %d', NOW, MICROS, heartbeat, full and 1 or 0,
    math.max(-1, math.min(following, LAST_MS)), math.max(-1, math.min(elsewhere, LAST_MS)), later)
  return lines
end

-- Says whether a database of this server holds the value that the broker's own connection has written there.
local function is_broker(home, database, name, proof)
  if database ~= home then
    local answer = redis.pcall('SELECT', database)
    if answer.err then
      return false -- a server of another kind, with fewer databases
    end
  end
  local found = redis.pcall('GET', name)
  if database ~= home then
    redis.call('SELECT', home)
  end
  return found == proof
end
