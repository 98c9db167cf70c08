-- ARGV: id, the number of finds that stops it, the find's id. A find that is sent again counts once.
if redis.call('EXISTS', KEYS[1]) == 0 then return 1 end
if redis.call('SADD', KEYS[8], ARGV[3]) == 0 then return redis.call('HEXISTS', KEYS[1], 'stopped') end
goes_with_it(KEYS[8])
if redis.call('HINCRBY', KEYS[1], 'finds', 1) >= tonumber(ARGV[2]) then stop(ARGV[1], 'finds', now()) end
return redis.call('HEXISTS', KEYS[1], 'stopped')
