-- ARGV: id, the number of finds that stops it, the number of finds that the log of one proxy shows.
if redis.call('EXISTS', KEYS[1]) == 0 then return 1 end
local finds = tonumber(ARGV[3])
if tonumber(redis.call('HGET', KEYS[1], 'finds') or '0') < finds then redis.call('HSET', KEYS[1], 'finds', whole(finds)) end
if finds >= tonumber(ARGV[2]) then stop(ARGV[1], 'finds', now()) end
return redis.call('HEXISTS', KEYS[1], 'stopped')
