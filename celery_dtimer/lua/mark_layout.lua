-- Note a service's layout in one of its shards: from now on that refuses calls by an older one.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] number of the layout   ARGV[3] how many shards there are, are wanted, the number, and how many
-- there ever were, with blanks in between: layout.lua hears it if the service forgets
-- Returns 1, or 0 when it knows that layout, or a newer one, already: then nothing was written.
-- Instances are told by a change of the membership.
-- Worst case: O(instances).

if number(fields(META, 'layout_here')[1], 0) >= tonumber(ARGV[2]) then
  return 0
end
redis.call('HSET', META, 'layout_here', ARGV[2], 'layout_told', ARGV[3])
count_change()
for _, instance in ipairs(redis.call('ZRANGE', INSTANCES, 0, -1)) do
  wake(instance)
end
send_wake_ups()
return 1
