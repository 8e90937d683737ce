-- Forget dead letters that are in another shard by now.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2..] ids of letters
-- Returns how many there were.
-- Worst case: O(letters of the call * log letters).

local dropped = 0
for i = 2, #ARGV do
  dropped = dropped + (drop_letter(ARGV[i]) and 1 or 0)
end
return dropped
