-- Webhooks: from the outbox to deliveries, and from there to endpoints, at least once.
-- A delivery is a hash and has its place in the index whq until it has ended: the index alone tells
-- what there is to do.  Fields of a delivery: st pending, delivered or failed, tn tenant, ep endpoint
-- or 'callback', url, br its circuit, ty type of the event, ev its id, bd the body, cr created, ex
-- when it is given up, du when the next attempt is due, at attempts so far (the fence of the last),
-- tr those since it was created or replayed, ln lease of the running attempt, hn how often the next
-- one was handed to a queue, te when it ended, a<n> note on attempt n; times in ms.

local MAX_NOTES = 20
local ON, OFF = 'e:', 'off:'

-- Counts a tenant's endpoints that are on.
local function recount(hooks)
  local on, seen = 0, {}
  local fields = redis.call('HKEYS', hooks)
  for _, field in ipairs(fields) do seen[field] = true end
  for _, field in ipairs(fields) do
    if string.sub(field, 1, #ON) == ON and not seen[OFF .. string.sub(field, #ON + 1)] then
      on = on + 1
    end
  end
  if on == 0 then redis.call('HDEL', hooks, 'on') else redis.call('HSET', hooks, 'on', on) end
end

-- Writes a field of a tenant's webhooks if it is still as its editor has read it.
-- KEYS wh   ARGV field expected ('' absent) new ('' goes) off reason ('' on, '=' as it is) max
-- -> 1 | 0 it has changed | -1 there are so many already
local function edit_hook(K, A)
  if (redis.call('HGET', K[1], A[1]) or '') ~= A[2] then return 0 end
  local endpoint = string.sub(A[1], 1, #ON) == ON and string.sub(A[1], #ON + 1)
  if endpoint and A[2] == '' and A[3] ~= '' then
    local num = 0
    for _, field in ipairs(redis.call('HKEYS', K[1])) do
      if string.sub(field, 1, #ON) == ON then num = num + 1 end
    end
    if num >= tonumber(A[5]) then return -1 end
  end
  if A[3] == '' then redis.call('HDEL', K[1], A[1]) else redis.call('HSET', K[1], A[1], A[3]) end
  if not endpoint then return 1 end
  if A[3] == '' or A[4] == '' then redis.call('HDEL', K[1], OFF .. endpoint)
  elseif A[4] ~= '=' then redis.call('HSET', K[1], OFF .. endpoint, A[4]) end
  recount(K[1])
  return 1
end

-- Asks for an event that nothing but the test of an endpoint is behind.
-- KEYS ev   ARGV tenant endpoint event   -> entry id
local function test_hook(K, A)
  return redis.call('XADD', K[1], '*', 'x', A[2], 'i', A[3], 'tn', A[1], 't', now())
end

-- Turns an entry of the outbox into its deliveries, once.
-- KEYS ev whq whl, then per delivery whd
-- ARGV entry tenant ttl_ms give_up_ms log_size type event body, then per delivery: id endpoint url
--      circuit
-- -> 1 | 0 the entry was gone
local function post_event(K, A)
  if redis.call('XDEL', K[1], A[1]) == 0 then return 0 end
  local t = now()
  for i = 4, #K do
    local b = 9 + (i - 4) * 4
    if redis.call('EXISTS', K[i]) == 0 then
      redis.call('HSET', K[i], 'st', 'pending', 'tn', A[2], 'ep', A[b + 1], 'url', A[b + 2],
        'br', A[b + 3], 'ty', A[6], 'ev', A[7], 'bd', A[8], 'cr', t, 'ex', t + A[4], 'du', t,
        'at', 0, 'tr', 0, 'hn', 0)
      redis.call('PEXPIRE', K[i], A[3])
      redis.call('ZADD', K[2], t, A[b])
      redis.call('ZADD', K[3], t, A[b])
    end
  end
  if #K > 3 then
    redis.call('ZREMRANGEBYRANK', K[3], 0, -1 - tonumber(A[5]))
    redis.call('PEXPIRE', K[3], A[3])
  end
  return 1
end

local function end_delivery(K, id, state, t)
  redis.call('HSET', K[1], 'st', state, 'te', t)
  redis.call('HDEL', K[1], 'ln')
  redis.call('ZREM', K[2], id)
end

-- Takes a due delivery for one attempt, unless somebody has it, the tenant has enough in flight or
-- the endpoint's circuit is open.  Behind an open circuit one attempt goes first.
-- KEYS whd whq whr whb   ARGV id lease_ms max_in_flight pause_ms failures_to_open
-- -> {attempt, now, failures of the circuit, fields of the delivery}
--    | {0, 'gone' | 'ended' | 'early' | 'taken' | 'old' | 'open' | 'crowded'}
local function take_delivery(K, A)
  local t, id = now(), A[1]
  local v = redis.call('HMGET', K[1], 'st', 'ln', 'du', 'ex')
  local function refuse_it(why, again)
    if again then redis.call('ZADD', K[2], again, id) else redis.call('ZREM', K[2], id) end
    return {0, why}
  end
  if not v[1] then return refuse_it('gone') end
  if v[1] ~= 'pending' then return refuse_it('ended') end
  if number(v[2]) > t then return {0, 'taken'} end
  if number(v[3]) > t then return {0, 'early'} end
  if number(v[4]) <= t then
    end_delivery(K, A[1], 'failed', t)
    return {0, 'old'}
  end
  local circuit = redis.call('HMGET', K[4], 'f', 'o')
  if number(circuit[2]) > t then return refuse_it('open', number(circuit[2])) end
  redis.call('ZREMRANGEBYSCORE', K[3], '-inf', t)
  if redis.call('ZCARD', K[3]) >= tonumber(A[3]) then return refuse_it('crowded', t + A[4]) end
  local lease = t + A[2]
  if number(circuit[1]) >= tonumber(A[5]) then redis.call('HSET', K[4], 'o', lease) end
  local attempt = redis.call('HINCRBY', K[1], 'at', 1)
  redis.call('HINCRBY', K[1], 'tr', 1)
  redis.call('HSET', K[1], 'ln', lease)
  redis.call('ZADD', K[2], lease, A[1])
  redis.call('ZADD', K[3], lease, A[1])
  redis.call('PEXPIRE', K[3], A[2])
  return {attempt, t, number(circuit[1]), redis.call('HGETALL', K[1])}
end

-- Closes a circuit after an answer.  Of a pause that is younger than the attempt the answer tells
-- nothing: the receiver has asked for it since, or kept failing since.
local function close_circuit(key, began, t)
  local v = redis.call('HMGET', key, 'o', 's')
  if number(v[1]) <= t or number(v[2]) < began then redis.call('DEL', key) end
end

-- Counts a failure; of two pauses the one that ends later holds.
local function fail_circuit(key, pause, ttl, t)
  redis.call('HINCRBY', key, 'f', 1)
  if pause > 0 then
    local until_ms = math.max(number(redis.call('HGET', key, 'o')), t + pause)
    redis.call('HSET', key, 'o', until_ms, 's', t)
  end
  redis.call('PEXPIRE', key, ttl)
end

-- Notes how an attempt went; only the last that took the delivery may.
-- KEYS whd whq whr whb wh
-- ARGV id attempt outcome (delivered, retry or failed) pause_ms note ttl_ms counts (1 a failure of
--      the endpoint, 0 none, -1 it answered) cooldown_ms circuit_ttl_ms endpoint off reason or ''
--      when the attempt began
-- -> the delivery's state | '' not ours
local function mark_delivery(K, A)
  local t = now()
  local v = redis.call('HMGET', K[1], 'st', 'at', 'ex')
  if v[1] ~= 'pending' or v[2] ~= A[2] then return '' end
  redis.call('ZREM', K[3], A[1])
  redis.call('HSET', K[1], 'a' .. A[2], A[5], 'hn', 0)
  redis.call('HDEL', K[1], 'a' .. (tonumber(A[2]) - MAX_NOTES))
  redis.call('PEXPIRE', K[1], A[6])
  if A[7] == '-1' then close_circuit(K[4], number(A[12]), t)
  elseif A[7] == '1' then fail_circuit(K[4], tonumber(A[8]), A[9], t) end
  if A[11] ~= '' and redis.call('HEXISTS', K[5], ON .. A[10]) == 1 then
    redis.call('HSETNX', K[5], OFF .. A[10], A[11])
    recount(K[5])
  end
  local due = t + A[4]
  if A[3] == 'retry' and due < number(v[3]) then
    redis.call('HSET', K[1], 'du', due)
    redis.call('HDEL', K[1], 'ln')
    redis.call('ZADD', K[2], due, A[1])
    return 'pending'
  end
  local state = A[3] == 'delivered' and A[3] or 'failed'
  end_delivery(K, A[1], state, t)
  return state
end

-- Leaves the next attempt to a queue for a while; whoever takes it then need not look at the index.
-- KEYS whd whq   ARGV id attempts hands wait_ms   -> 1 | 0 it has changed
local function hand_delivery(K, A)
  local v = redis.call('HMGET', K[1], 'st', 'at', 'hn', 'ln')
  if v[1] ~= 'pending' or v[2] ~= A[2] or v[3] ~= A[3] or number(v[4]) > now() then return 0 end
  redis.call('HINCRBY', K[1], 'hn', 1)
  redis.call('ZADD', K[2], now() + A[4], A[1])
  return 1
end

-- Begins a delivery again, under the same event id, whatever became of it.
-- KEYS whd whq   ARGV id ttl_ms give_up_ms   -> 1 | 0 not known | -1 an attempt runs
local function replay_delivery(K, A)
  local t = now()
  local v = redis.call('HMGET', K[1], 'st', 'ln')
  if not v[1] then return 0 end
  if number(v[2]) > t then return -1 end
  redis.call('HSET', K[1], 'st', 'pending', 'du', t, 'ex', t + A[3], 'tr', 0, 'hn', 0)
  redis.call('HDEL', K[1], 'te', 'ln')
  redis.call('PEXPIRE', K[1], A[2])
  redis.call('ZADD', K[2], t, A[1])
  return 1
end

-- A process that works off the queue of deliveries says that it is there.
-- KEYS whw   ARGV worker ttl_ms (0 goodbye)   -> how many there are
local function serve_hooks(K, A)
  local t = now()
  redis.call('ZREMRANGEBYSCORE', K[1], '-inf', t)
  if A[2] == '0' then redis.call('ZREM', K[1], A[1])
  else redis.call('ZADD', K[1], t + A[2], A[1]) end
  return redis.call('ZCARD', K[1])
end
