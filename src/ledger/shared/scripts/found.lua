-- ARGV: id, the number of finds that stops it.
if redis.call('EXISTS', KEYS[1]) == 0 then return 1 end
if redis.call('HINCRBY', KEYS[1], 'finds', 1) >= tonumber(ARGV[2]) then stop(ARGV[1], 'finds', now()) end
return redis.call('HEXISTS', KEYS[1], 'stopped')
