-- Forget runs that an instance has noted and does not send after all.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] instance id   then per run: timer id, task id
-- Returns how many were forgotten: not one that a worker has started, or another instance has noted since.
-- Worst case: O(runs of the call * log runs that are out).

local closed = 0
for i = 3, #ARGV, 2 do
  if select(8, lease_of(ARGV[i + 1])) == '-' .. ARGV[2] then
    close_run(ARGV[i + 1], ARGV[i])
    closed = closed + 1
  end
end
send_wake_ups()
return closed
