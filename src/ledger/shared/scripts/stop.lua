-- ARGV: id, reason.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
stop(ARGV[1], ARGV[2], now())
return 1
