-- Forget runs that were noted and are not sent after all.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   then per run: timer id, task id
-- Returns how many were forgotten: one that a worker has started is not.
-- Worst case: O(runs of the call * log runs that are out).

local closed = 0
for i = 2, #ARGV, 2 do
  if select(8, lease_of(ARGV[i + 1])) == '-' then
    close_run(ARGV[i + 1], ARGV[i])
    closed = closed + 1
  end
end
send_wake_ups()
return closed
