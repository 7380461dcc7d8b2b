-- Files and batches of requests, whose content is in the blob store: here are their names, what is
-- known of them, and when they are over.
-- Key types: file/batch/parts = hash, files/batches/active/expiry = sorted set, ev = stream.
-- Batch fields: st state, ca created, xa expires, lo holder of the lease, le its expiry (ms), cur
-- parts begun, lk/lb lines answered and failed as last told, ok/bad the same of whole parts,
-- ui/uc/uo input, cached and output tokens, t:<state> when it came there (ms); others are the
-- caller's own.

local BATCH_ENDED = {completed = true, failed = true, expired = true, cancelled = true}
local HOLD_MS = 3600000

-- KEYS file files expiry   ARGV id member ttl_ms field1 value1 ...   -> 1 | 0 there was one
local function put_file(K, A)
  if redis.call('EXISTS', K[1]) == 1 then return 0 end
  local t = now()
  local ends = t + tonumber(A[3])
  redis.call('HSET', K[1], 'ca', t, 'xa', ends, unpack(A, 4))
  redis.call('PEXPIRE', K[1], A[3])
  redis.call('ZADD', K[2], 0, A[1])
  redis.call('ZADD', K[3], ends, A[2])
  return 1
end

-- Deletes a file for its owner; its blob goes when no batch needs it any more.
-- KEYS file files expiry   ARGV id member   -> 1 | 0 there is none
local function drop_file(K, A)
  local held = redis.call('HMGET', K[1], 'ca', 'hu')
  if not held[1] then return 0 end
  redis.call('DEL', K[1])
  redis.call('ZREM', K[2], A[1])
  redis.call('ZADD', K[3], math.max(now(), number(held[2])), A[2])
  return 1
end

-- Forgets a file or a batch whose time is over and whose blobs are gone.
-- KEYS file_or_batch files_or_batches expiry   ARGV id member   -> 1 | 0 it is not over
local function forget_stored(K, A)
  local due = redis.call('ZSCORE', K[3], A[2])
  if not due or tonumber(due) > now() then return 0 end
  redis.call('DEL', K[1])
  redis.call('ZREM', K[2], A[1])
  redis.call('ZREM', K[3], A[2])
  return 1
end

-- Accepts a batch; its input stays in the store for as long as it may be read.
-- KEYS batch batches active expiry file idem
-- ARGV id member expiry_member file_expiry_member window_ms idem_key body_sha field1 value1 ...
-- -> {1, id} accepted | {0, id} it was, by this id or this key; errors CONFLICT id, NOFILE
local function create_batch(K, A)
  if redis.call('EXISTS', K[1]) == 1 then return {0, A[1]} end
  if A[6] ~= '' then
    local known = redis.call('GET', K[6])
    local sha, id = string.match(known or '', '^(%S+) (%S+)$')
    if id and sha ~= A[7] then return redis.error_reply('CONFLICT ' .. id) end
    if id then return {0, id} end
  end
  if redis.call('EXISTS', K[5]) == 0 then return redis.error_reply('NOFILE') end
  local t = now()
  local ends = t + tonumber(A[5])
  redis.call('HSET', K[1], 'st', 'validating', 'ca', t, 'xa', ends, unpack(A, 8))
  redis.call('PEXPIRE', K[1], tonumber(A[5]) + BATCH_TTL_MS)
  if A[6] ~= '' then
    redis.call('SET', K[6], A[7] .. ' ' .. A[1], 'PX', tonumber(A[5]) + BATCH_TTL_MS)
  end
  redis.call('ZADD', K[2], 0, A[1])
  redis.call('ZADD', K[3], ends, A[2])
  redis.call('ZADD', K[4], ends + BATCH_TTL_MS, A[3])
  redis.call('ZADD', K[4], 'GT', ends + HOLD_MS, A[4])
  redis.call('HSET', K[5], 'hu', ends + HOLD_MS)
  return {1, A[1]}
end

-- Whether a caller holds the lease of a batch, or nobody does; v = {st, lo, le}
local function may_work(v, owner, t)
  return not v[2] or v[2] == owner or number(v[3]) <= t
end

-- Keeps a number in a field unless there is a larger one.
local function raise_to(key, field, value)
  if number(redis.call('HGET', key, field)) < number(value) then
    redis.call('HSET', key, field, value)
  end
end

-- Takes or renews the right to work on a batch, and tells how far that is.
-- KEYS batch   ARGV owner lease_ms (0 gives it up) cursor answered failed
-- -> {1, state, now_ms, expires_ms} | {0, state, ..} another one works on it, or it has ended
local function lease_batch(K, A)
  local t, v = now(), redis.call('HMGET', K[1], 'st', 'lo', 'le', 'xa')
  if not v[1] or BATCH_ENDED[v[1]] or not may_work(v, A[1], t) then
    return {0, v[1] or '', t, number(v[4])}
  end
  if A[2] == '0' then redis.call('HDEL', K[1], 'lo', 'le')
  else redis.call('HSET', K[1], 'lo', A[1], 'le', t + tonumber(A[2])) end
  raise_to(K[1], 'cur', A[3])
  raise_to(K[1], 'lk', A[4])
  raise_to(K[1], 'lb', A[5])
  return {1, v[1], t, number(v[4])}
end

-- Moves a batch to its next state as the holder of its lease; an end is told to the outbox.
-- KEYS batch parts active expiry ev wh
-- ARGV owner from to member expiry_member tenant id field1 value1 ...
-- -> {1, state} | {0, state} it is in another state | {-1, state} another one works on it
local function turn_batch(K, A)
  local t, v = now(), redis.call('HMGET', K[1], 'st', 'lo', 'le', 'wh', 'md')
  if v[1] == A[3] then return {1, v[1]} end
  if v[1] ~= A[2] then return {0, v[1] or ''} end
  if not may_work(v, A[1], t) then return {-1, v[1]} end
  redis.call('HSET', K[1], 'st', A[3], 't:' .. A[3], t, unpack(A, 8))
  if not BATCH_ENDED[A[3]] then return {1, A[3]} end
  redis.call('HDEL', K[1], 'lo', 'le', 'lk', 'lb')
  redis.call('PEXPIRE', K[1], BATCH_TTL_MS)
  redis.call('DEL', K[2])
  redis.call('ZREM', K[3], A[4])
  redis.call('ZADD', K[4], t + BATCH_TTL_MS, A[5])
  put_event(K[5], K[6], v[4] or '', {'b', A[7], 's', A[3], 'tn', A[6], 't', t,
    unpack(without_defaults('m', v[5] and v[5] ~= '{}' and v[5] or ''))})
  return {1, A[3]}
end

-- Counts a part of the output that is in the store, once.
-- KEYS batch parts   ARGV owner number answered failed input cached output
-- -> 1 counted | 0 it was | -1 another one works on the batch
local function part_batch(K, A)
  local v = redis.call('HMGET', K[1], 'st', 'lo', 'le')
  if not v[1] or BATCH_ENDED[v[1]] or not may_work(v, A[1], now()) then return -1 end
  if redis.call('HSETNX', K[2], A[2], A[3] .. ' ' .. A[4]) == 0 then return 0 end
  redis.call('PEXPIRE', K[2], 2 * BATCH_TTL_MS)
  for i, field in ipairs({'ok', 'bad', 'ui', 'uc', 'uo'}) do
    redis.call('HINCRBY', K[1], field, A[i + 2])
  end
  return 1
end

-- Asks for the end of a batch that still works; its output will be the files of these ids.
-- KEYS batch   ARGV output error   -> {1, state} | {0, state} it works no more; '' there is none
local function stop_batch(K, A)
  local state = redis.call('HGET', K[1], 'st')
  if state == 'cancelling' then return {1, state} end
  if state ~= 'validating' and state ~= 'in_progress' then return {0, state or ''} end
  redis.call('HSET', K[1], 'st', 'cancelling', 't:cancelling', now(), 'of', A[1], 'ef', A[2])
  return {1, 'cancelling'}
end
