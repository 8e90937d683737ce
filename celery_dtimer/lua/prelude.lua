-- Shared by every script; it is put in front of each.
--
-- Every script declares two keys. KEYS[1] is meta:{service}; all others are built from it by key(), inside the same hash
-- tag. KEYS[2] is never:{service}, which never exists: while a Cluster slot moves, the server then answers TRYAGAIN
-- instead of showing half of the keys as missing.
--
-- A script is isolated, not rolled back: it reads and checks before its first write. User data is opaque here.
-- Moments are whole milliseconds of the server's clock; ARGV[1] of every script is such a moment given by a test, or "".

local PREFIX, TAG = string.match(KEYS[1], '^(.-)meta:({[^}]*})$')
local UNASSIGNED = 'unassigned'
local FENCED, BUSY = -1, -2

local function key(what, id)
  if id then
    return PREFIX .. what .. ':' .. TAG .. ':' .. id
  end
  return PREFIX .. what .. ':' .. TAG
end

local META = KEYS[1]
local QUEUE = key('timer_queue')
local INSTANCES = key('service_instances')
local INACTIVE = key('inactive_timers')

local function whole(number)
  return string.format('%.0f', number)
end

-- A field's number; the default when it is not there, or was edited into something else.
local function number(text, default)
  return tonumber(text) or default
end

local function server_ms()
  if ARGV[1] ~= '' then
    return tonumber(ARGV[1])
  end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local NOW = server_ms()

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

-- Says whether the instance is registered with this epoch.
local function holds_epoch(id, epoch)
  return fields(key('instance', id), 'epoch')[1] == epoch
    and redis.call('ZSCORE', INSTANCES, id) and true
end

-- The registered instances with the moment of their last heartbeat, oldest first.
local function registered()
  local found, rows = {}, redis.call('ZRANGE', INSTANCES, 0, -1, 'WITHSCORES')
  for i = 1, #rows, 2 do
    local row = fields(key('instance', rows[i]), 'status', 'heartbeat_interval', 'instance_timeout')
    table.insert(found, {
      id = rows[i],
      heartbeat = tonumber(rows[i + 1]),
      status = row[1],
      interval = number(row[2], 5000),
      timeout = number(row[3], 30000),
    })
  end
  return found
end

-- The instances that may be given timers, with their loads: those heard within two intervals, else within the timeout.
local function candidates()
  local fresh, late = {}, {}
  for _, instance in ipairs(registered()) do
    local age = NOW - instance.heartbeat
    if instance.status == 'active' and age <= instance.timeout then
      instance.load = redis.call('ZCARD', key('instance_timers', instance.id))
      table.insert(age <= 2 * instance.interval and fresh or late, instance)
    end
  end
  return #fresh > 0 and fresh or late
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
  redis.call('ZREM', key('instance_timers', owner or UNASSIGNED), id)
end

-- Put an existing timer aside: paused, stopped or broken.
local function set_aside(id, owner, status, reason)
  unschedule(id, owner)
  redis.call('HSET', key('timer', id), 'status', status, 'reason', reason)
  redis.call('HDEL', key('timer', id), 'owner', 'attempts')
  redis.call('ZADD', INACTIVE, '+inf', id)
end

-- Remove all that is stored of a timer.
local function erase(id)
  local row = fields(key('timer', id), 'owner', 'parent', 'source')
  unschedule(id, row[1])
  redis.call('ZREM', INACTIVE, id)
  redis.call('DEL', key('timer', id), key('timer_definition', id))
  if row[2] then
    redis.call('SREM', key('triggers', row[2]), id)
  end
  if row[3] and row[3] ~= '' then
    redis.call('SREM', key('static_timers', row[3]), id)
  end
end

-- Remove a timer with its pending triggers.
local function erase_family(id)
  for _, trigger in ipairs(redis.call('SMEMBERS', key('triggers', id))) do
    erase(trigger)
  end
  redis.call('DEL', key('triggers', id))
  erase(id)
end

-- Remove what is left of a timer whose hash is gone, or is something else; whoever declares it writes it again.
local function bury(id)
  unschedule(id, UNASSIGNED)
  redis.call('ZREM', INACTIVE, id)
  redis.call('DEL', key('timer', id), key('timer_definition', id))
  for _, instance in ipairs(registered()) do
    redis.call('ZREM', key('instance_timers', instance.id), id)
    local source = fields(key('instance', instance.id), 'source')[1]
    if source then
      redis.call('SREM', key('static_timers', source), id)
    end
  end
  redis.call('HINCRBY', META, 'members', 1)
end

-- Move up to `limit` timers, soonest due first, from one instance to those of `found`; answers how many left the source.
-- A member without a timer is dropped.
local function hand_over(from, found, limit)
  local source = key('instance_timers', from)
  local rows = redis.call('ZRANGE', source, 0, limit - 1, 'WITHSCORES')
  local choose = placement(found)
  for i = 1, #rows, 2 do
    local id, at = rows[i], rows[i + 1]
    local status = fields(key('timer', id), 'status')[1]
    redis.call('ZREM', source, id)
    if status == 'active' then
      assign(id, at, choose())
    elseif status then
      redis.call('ZREM', QUEUE, id)
    else
      bury(id)
    end
  end
  return #rows / 2
end

-- Remove an instance that owns nothing any more.
local function forget(id)
  local declaration = fields(key('instance', id), 'declaration')[1]
  redis.call('ZREM', INSTANCES, id)
  redis.call('DEL', key('instance', id), key('instance_timers', id))
  redis.call('HINCRBY', META, 'members', 1)
  if declaration then
    for _, other in ipairs(redis.call('ZRANGE', INSTANCES, 0, -1)) do
      local row = fields(key('instance', other), 'declaration', 'declaring')
      if row[1] == declaration or row[2] == declaration then
        return
      end
    end
    redis.call('DEL', key('declaration', declaration))
  end
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
      first = math.max(expiry, 0)
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

local function hold_mover(id)
  redis.call('HSET', META, 'mover', id, 'mover_until', whole(NOW + MOVER_MS))
end

local function release_mover()
  redis.call('HDEL', META, 'mover', 'mover_until')
end
