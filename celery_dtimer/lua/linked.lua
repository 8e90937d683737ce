-- Ask whether the server that holds the timers is the broker's.
-- KEYS[1] meta   KEYS[2] never
-- ARGV[1] now or ""   ARGV[2] the timers' database   ARGV[3] the broker's   ARGV[4] a key in it   ARGV[5] its value
-- Returns 1 when the broker's database is here and holds that value, else 0.
-- Worst case: O(1).

return is_broker(ARGV[2], ARGV[3], ARGV[4], ARGV[5]) and 1 or 0
