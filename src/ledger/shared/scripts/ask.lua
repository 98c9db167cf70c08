-- KEYS: 7 maps the approval to its execution. ARGV: id, digest, lifetime in ms, the approval, the maximum of open ones,
-- the maximum of ended ones, how long ended ones are kept in ms, the execution. The reply includes the stored approval
-- that it is based on, which the caller verifies.
if redis.call('EXISTS', KEYS[1]) == 0 then return { 'unknown', '', '' } end
local at, open, ended = now(), 0, {}
local all = redis.call('HGETALL', KEYS[5])
for i = 1, #all, 2 do
  local id, text = all[i], all[i + 1]
  local state, digest, created, expires, rest = string.match(text, '^(%a+) (%x+) (%d+) (%d+) (.*)$')
  created, expires = tonumber(created), tonumber(expires)
  local has_expired = expires <= at
  if digest == ARGV[2] and not has_expired and state ~= 'used' then
    if state == 'approved' then
      local used = table.concat({ 'used', digest, whole(created), whole(expires), rest }, ' ')
      redis.call('HSET', KEYS[5], id, used)
    end
    return { state, id, text }
  end
  if expires + tonumber(ARGV[7]) <= at then
    redis.call('HDEL', KEYS[5], id)
  elseif has_expired or state == 'used' or state == 'denied' then
    table.insert(ended, { created, id })
  else
    open = open + 1
  end
end
table.sort(ended, function(a, b) return a[1] < b[1] end)
for i = 1, #ended - tonumber(ARGV[6]) do
  redis.call('HDEL', KEYS[5], ended[i][2])
end
if open >= tonumber(ARGV[5]) then return { 'full', '', '' } end
if redis.call('EXISTS', KEYS[7]) == 1 then return { 'exists', '', '' } end
local lifetime = tonumber(ARGV[3])
local text = table.concat({ 'pending', ARGV[2], whole(at), whole(at + lifetime), ARGV[4] }, ' ')
redis.call('HSET', KEYS[5], ARGV[1], text)
goes_with_it(KEYS[5])
redis.call('SET', KEYS[7], ARGV[8], 'PX', whole(lifetime + tonumber(ARGV[7])))
return { 'pending', ARGV[1], '' }
