-- Forget the leases of runs that are in another shard by now.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2..] task ids
-- Returns 1.
-- Worst case: O(runs of the call * log runs that are out).

for i = 2, #ARGV do
  drop_lease(ARGV[i])
end
return 1
