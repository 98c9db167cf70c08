-- KEYS: 1 this proxy's cursor. ARGV: the cursor that the batch follows, or '' for none, the batch's cursor, then
-- alternating ids and half-credits. A batch that was delayed on the network, and has been sent again since, follows
-- another cursor than the stored one.
local stored = redis.call('GET', KEYS[1]) or ''
if stored == ARGV[2] then return 'done' end
if stored ~= ARGV[1] then return 'moved' end
for at = 3, #ARGV, 2 do
  local execution = 'exeat:{' .. ARGV[at] .. '}:x'
  if redis.call('EXISTS', execution) == 1 then redis.call('HINCRBY', execution, 'credits', ARGV[at + 1]) end
end
redis.call('SET', KEYS[1], ARGV[2])
return 'done'
