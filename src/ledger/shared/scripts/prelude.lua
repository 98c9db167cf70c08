-- The beginning of every script. KEYS of scripts for one execution: 1 the execution, 2 the index of all executions that
-- end (a sorted set by the time at which they may be removed), 3 its judged calls, 4 its reported calls, 5 its
-- approvals, 6 the set of static executions, 7 the ids of its approvals by digest, 8 the ids of its finds. Invalid data ends the script with an error, before anything is counted.
local FORGOTTEN_AFTER = 3600000

local function now()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function whole(number)
  return string.format('%.0f', number)
end

-- The other keys of an execution expire together with it.
local function goes_with_it(key)
  local left = redis.call('PTTL', KEYS[1])
  if left > 0 then redis.call('PEXPIRE', key, whole(left)) end
end

local function create(id, facts, expires)
  redis.call('DEL', KEYS[1], KEYS[3], KEYS[4], KEYS[5], KEYS[7], KEYS[8])
  if expires == 'static' then
    redis.call('HSET', KEYS[1], 'facts', facts, 'static', '1')
    redis.call('SADD', KEYS[6], id)
  elseif expires == '' then
    redis.call('HSET', KEYS[1], 'facts', facts)
    redis.call('ZADD', KEYS[2], '+inf', id)
  else
    local gone = whole(tonumber(expires) + FORGOTTEN_AFTER)
    redis.call('HSET', KEYS[1], 'facts', facts, 'expires', expires)
    redis.call('PEXPIREAT', KEYS[1], gone)
    redis.call('ZADD', KEYS[2], gone, id)
  end
end

-- The first reason is kept.
local function stop(id, why, at)
  if redis.call('HEXISTS', KEYS[1], 'stopped') == 1 then return end
  redis.call('HSET', KEYS[1], 'stopped', why, 'stopped_at', whole(at))
  if redis.call('HEXISTS', KEYS[1], 'static') == 1 then return end
  local gone = at + FORGOTTEN_AFTER
  local expires = redis.call('HGET', KEYS[1], 'expires')
  if expires then gone = math.min(gone, tonumber(expires) + FORGOTTEN_AFTER) end
  for _, key in ipairs({ KEYS[1], KEYS[3], KEYS[4], KEYS[5], KEYS[7], KEYS[8] }) do
    redis.call('PEXPIREAT', key, whole(gone))
  end
  redis.call('ZADD', KEYS[2], whole(gone), id)
end
