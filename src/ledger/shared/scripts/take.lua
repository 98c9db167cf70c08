-- ARGV: id, 't' or 'r', the limit per execution or '', the limit per minute or '', the facts of a static execution
-- or '', 'take' or 'peek' (which does not count), the expiry time according to its facts or ''.
local kind, at = ARGV[2], now()
local kept = redis.call('HMGET', KEYS[1], 'facts', 'stopped', 'expires', kind .. 'n', kind .. 'a', kind .. 'w')
if not kept[1] then
  if ARGV[5] == '' then return { 'unknown', 0 } end
  if ARGV[6] == 'take' then create(ARGV[1], ARGV[5], 'static') end
end
if kept[2] then return { 'stopped', 0 } end
if kept[3] and tonumber(kept[3]) <= at then return { 'expired', 0 } end
if ARGV[7] ~= '' and tonumber(ARGV[7]) <= at then return { 'expired', 0 } end
local calls, used = tonumber(kept[4] or '0'), tonumber(kept[6] or '0')
if ARGV[3] ~= '' and calls >= tonumber(ARGV[3]) then return { 'execution', 0 } end
local anchor = tonumber(kept[5] or whole(at))
if at - anchor >= 60000 then
  anchor, used = at, 0
end
-- If the clock was set back, the window must not last longer than a minute.
anchor = math.min(anchor, at)
if ARGV[4] ~= '' and used >= tonumber(ARGV[4]) then
  if kept[5] then redis.call('HSET', KEYS[1], kind .. 'a', whole(anchor)) end
  return { 'minute', anchor + 60000 - at }
end
if ARGV[6] == 'peek' then return { 'counted', calls + 1 } end
redis.call('HSET', KEYS[1], kind .. 'n', whole(calls + 1), kind .. 'a', whole(anchor), kind .. 'w', whole(used + 1))
return { 'counted', calls + 1 }
