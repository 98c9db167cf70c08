-- KEYS: 9 maps the approval to its execution. ARGV: id, digest, lifetime in ms, the approval, the maximum of open ones,
-- the maximum of ended ones, how long ended ones are kept in ms, the execution. The reply includes the stored approval
-- that it is based on, which the caller verifies.
--
-- A request is sent again until it is decided, so a known digest is looked up without reading the other approvals. KEYS 7
-- also has the time until which the execution has no room for another approval, in the field 'full'.
if redis.call('EXISTS', KEYS[1]) == 0 then return { 'unknown', '', '' } end
local at, open, ended, room_at = now(), 0, {}, nil

local function answer(id, text)
  local state, digest, created, expires, rest = string.match(text, '^(%a+) (%x+) (%d+) (%d+) (.*)$')
  created, expires = tonumber(created), tonumber(expires)
  if digest ~= ARGV[2] or expires <= at or state == 'used' then return nil end
  if state == 'approved' then
    local used = table.concat({ 'used', digest, whole(created), whole(expires), rest }, ' ')
    redis.call('HSET', KEYS[5], id, used)
    redis.call('HDEL', KEYS[7], ARGV[2], 'full')
  end
  return { state, id, text }
end

local known = redis.call('HGET', KEYS[7], ARGV[2])
local text = known and redis.call('HGET', KEYS[5], known)
local answered = text and answer(known, text)
if answered then return answered end
local full = redis.call('HGET', KEYS[7], 'full')
if full and tonumber(full) > at then return { 'full', '', '' } end

local all = redis.call('HGETALL', KEYS[5])
for i = 1, #all, 2 do
  local id, text = all[i], all[i + 1]
  answered = answer(id, text)
  if answered then return answered end
  local state, digest, created, expires = string.match(text, '^(%a+) (%x+) (%d+) (%d+) ')
  created, expires = tonumber(created), tonumber(expires)
  if expires + tonumber(ARGV[7]) <= at then
    redis.call('HDEL', KEYS[5], id)
    redis.call('HDEL', KEYS[7], digest)
  elseif expires <= at or state == 'used' or state == 'denied' then
    table.insert(ended, { created, id, digest })
  else
    open = open + 1
    if not room_at or expires < room_at then room_at = expires end
  end
end
table.sort(ended, function(a, b) return a[1] < b[1] end)
for i = 1, #ended - tonumber(ARGV[6]) do
  redis.call('HDEL', KEYS[5], ended[i][2])
  redis.call('HDEL', KEYS[7], ended[i][3])
end
if open >= tonumber(ARGV[5]) then
  redis.call('HSET', KEYS[7], 'full', whole(room_at))
  goes_with_it(KEYS[7])
  return { 'full', '', '' }
end
if redis.call('EXISTS', KEYS[9]) == 1 then return { 'exists', '', '' } end
local lifetime = tonumber(ARGV[3])
text = table.concat({ 'pending', ARGV[2], whole(at), whole(at + lifetime), ARGV[4] }, ' ')
redis.call('HSET', KEYS[5], ARGV[1], text)
redis.call('HSET', KEYS[7], ARGV[2], ARGV[1])
goes_with_it(KEYS[5])
goes_with_it(KEYS[7])
redis.call('SET', KEYS[9], ARGV[8], 'PX', whole(lifetime + tonumber(ARGV[7])))
return { 'pending', ARGV[1], '' }
