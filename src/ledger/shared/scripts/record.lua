-- ARGV: '1' if the call was only reported, the call, the maximum number of calls kept.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local list = ARGV[1] == '1' and KEYS[4] or KEYS[3]
local most = tonumber(ARGV[3])
redis.call('RPUSH', list, redis.call('HINCRBY', KEYS[1], 'numbered', 1) .. ' ' .. ARGV[2])
redis.call('LTRIM', KEYS[3], -most, -1)
local room = most - redis.call('LLEN', KEYS[3])
if room == 0 then redis.call('DEL', KEYS[4]) else redis.call('LTRIM', KEYS[4], -room, -1) end
goes_with_it(list)
return 1
