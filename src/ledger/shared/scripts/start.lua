-- ARGV: id, facts, the expiry time or '', the maximum number of executions.
if redis.call('EXISTS', KEYS[1]) == 1 then return 'exists' end
local at = now()
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', whole(at))
if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[4]) then
  -- Remove the executions that ended first.
  local ended = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', whole(at + FORGOTTEN_AFTER), 'LIMIT', 0, 1)[1]
  if not ended then return 'full' end
  for _, part in ipairs({ 'x', 'judged', 'reported', 'approvals', 'digests', 'finds' }) do
    redis.call('DEL', 'exeat:{' .. ended .. '}:' .. part)
  end
  redis.call('ZREM', KEYS[2], ended)
end
create(ARGV[1], ARGV[2], ARGV[3])
return 'started'
