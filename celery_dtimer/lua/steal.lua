-- Give an instance with nothing due up to ARGV[5] overdue timers of one that lags, soonest due first, and no more than
-- half of them (rounded up).
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id of the caller   ARGV[3] epoch   ARGV[4] lag in ms that is left alone   ARGV[5] limit
-- Returns {moved, 1 when more lags}, -1 when the caller's epoch is over, -2 when another instance is moving timers.
-- The most overdue instance with a timer to take is helped. What it has in flight stays: it may be published by now. An
-- instance that is leaving or drained, or whose broker is down, takes nothing. The mover is not held, so that several may help.
-- Worst case: O(instances log instances + (limit + timers in flight) log timers).

check_types()
local id, limit = ARGV[2], tonumber(ARGV[5])
local late = whole(NOW - tonumber(ARGV[4]))
local hindered = hindrance(id, ARGV[3])
if hindered then
  return hindered
end
local caller = fields(key('instance', id), 'status', 'broker')
if caller[1] ~= 'active' or caller[2] == 'down' then
  return {0, 0}
end

local function in_flight(instance)
  local found, count = {}, 0
  for timer in string.gmatch(fields(key('instance', instance), 'in_flight')[1] or '', '%S+') do
    found[timer], count = true, count + 1
  end
  return found, count
end

local function caller_itself()
  return id
end

-- Answers how many left the instance, and how many more may be taken.
local function take_from(instance)
  local source = key('instance_timers', instance)
  local spared, count = in_flight(instance)
  local overdue = redis.call('ZCOUNT', source, '-inf', late)
  local wanted = math.min(limit, math.ceil(overdue / 2))
  local rows = redis.call('ZRANGEBYSCORE', source, '-inf', late, 'WITHSCORES', 'LIMIT', 0, wanted + count)
  local taken, left = {}, overdue
  for i = 1, #rows, 2 do
    if spared[rows[i]] then
      left = left - 1
    elseif #taken < 2 * wanted then
      add(taken, rows[i], rows[i + 1])
    end
  end
  move(taken, source, caller_itself)
  local moved = #taken / 2
  return moved, left - moved
end

local others = heads(id)
for i, other in ipairs(others) do
  if other.at > tonumber(late) then
    break
  end
  local moved, left = take_from(other.id)
  if moved > 0 then
    local following = others[i + 1]
    local more = left > 0 or following and following.at <= tonumber(late)
    return {moved, more and 1 or 0} -- no wake-up: whoever was given timers is the caller
  end
end
return {0, 0}
