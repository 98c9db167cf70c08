-- ARGV: '1' if the calls were only reported, the maximum number of calls kept, then the calls, oldest first. A call that
-- is already in the record is left out: after a lost reply, the same calls are sent again.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local list = ARGV[1] == '1' and KEYS[4] or KEYS[3]
local most = tonumber(ARGV[2])
local known = {}
for _, kept in ipairs(redis.call('LRANGE', list, 0, -1)) do known[string.sub(kept, string.find(kept, ' ', 1, true) + 1)] = true end
for at = 3, #ARGV do
  if not known[ARGV[at]] then
    redis.call('RPUSH', list, redis.call('HINCRBY', KEYS[1], 'numbered', 1) .. ' ' .. ARGV[at])
  end
end
redis.call('LTRIM', KEYS[3], -most, -1)
local room = most - redis.call('LLEN', KEYS[3])
if room == 0 then redis.call('DEL', KEYS[4]) else redis.call('LTRIM', KEYS[4], -room, -1) end
goes_with_it(list)
return 1
