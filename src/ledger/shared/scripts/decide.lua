-- ARGV: the approval's id, what it shall be.
local text = redis.call('HGET', KEYS[5], ARGV[1])
if not text then return 'unknown' end
local state, rest, expires = string.match(text, '^(%a+)( %x+ %d+ (%d+) .*)$')
if tonumber(expires) <= now() and (state == 'pending' or state == 'approved') then return 'expired' end
if state ~= 'pending' then return state end
redis.call('HSET', KEYS[5], ARGV[1], ARGV[2] .. rest)
return 'done'
