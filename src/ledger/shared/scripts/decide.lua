-- ARGV: the approval's id, its new value, the value that the decision was signed for.
local text = redis.call('HGET', KEYS[5], ARGV[1])
if not text then return 'unknown' end
if text ~= ARGV[3] then return 'changed' end
local state, expires = string.match(text, '^(%a+) %x+ %d+ (%d+) .*$')
if tonumber(expires) <= now() and (state == 'pending' or state == 'approved') then return 'expired' end
if state ~= 'pending' then return state end
redis.call('HSET', KEYS[5], ARGV[1], ARGV[2])
-- A denied one makes room for another.
redis.call('HDEL', KEYS[7], 'full')
return 'done'
