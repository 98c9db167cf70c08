-- KEYS: 1 this proxy's cursor. ARGV: the cursor, then alternating ids and half-credits.
if redis.call('GET', KEYS[1]) == ARGV[1] then return 0 end
for at = 2, #ARGV, 2 do
  local execution = 'exeat:{' .. ARGV[at] .. '}:x'
  if redis.call('EXISTS', execution) == 1 then redis.call('HINCRBY', execution, 'credits', ARGV[at + 1]) end
end
redis.call('SET', KEYS[1], ARGV[1])
return 1
