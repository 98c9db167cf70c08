-- ARGV: 't' or 'r', how many milliseconds ago the call was counted.
local kind = ARGV[1]
local kept = redis.call('HMGET', KEYS[1], kind .. 'n', kind .. 'a', kind .. 'w')
if not kept[1] then return 0 end
local calls, anchor, used = tonumber(kept[1]), tonumber(kept[2]), tonumber(kept[3])
-- A window that started later did not count this call.
if anchor <= now() - tonumber(ARGV[2]) then used = math.max(used - 1, 0) end
redis.call('HSET', KEYS[1], kind .. 'n', whole(math.max(calls - 1, 0)), kind .. 'w', whole(used))
return 1
