-- Records of responses, what they take of the memory, and when they go.
-- Key types: record = string, expiry = sorted set of '<bytes> <tenant> <job>', totals = hash: bytes of
-- each tenant's records, '*' of all.

-- Of a record beside its content: names, entries of the index.
local RECORD_BYTES = 400
-- What records of all tenants, and those of a tenant for which nothing is set, may take of what
-- unfinished jobs may.
local RECORDS_SHARE = 1 / 4
local TENANT_SHARE = 1 / 2
local MAX_FORGOTTEN = 256
local INDEX_SPARE_MS = 86400000

local function count_record(totals, tenant, bytes)
  count(totals, tenant, bytes)
  count(totals, '*', bytes)
end

local function forget_records(K, t)
  local over = redis.call('ZRANGEBYSCORE', K[2], '-inf', t, 'LIMIT', 0, MAX_FORGOTTEN)
  for _, member in ipairs(over) do
    local bytes, tenant = string.match(member, '^(%d+) (%S+) ')
    redis.call('ZREM', K[2], member)
    if bytes then count_record(K[3], tenant, -number(bytes)) end
  end
end

-- Why there is no room for a record of so many bytes: {whose, used, limit}; nil if there is.
local function lacks_record_room(K, tenant, bytes)
  local v = redis.call('HMGET', K[4], 'response_bytes:' .. tenant, 'response_bytes:*')
  local used = redis.call('HMGET', K[3], tenant, '*')
  local most = number(redis.call('HGET', K[5], 'mb')) * RECORDS_SHARE
  local own = setting(v[1]) or setting(v[2])
  if not own and most > 0 then own = most * TENANT_SHARE end
  if own and number(used[1]) + bytes > own then
    return {'tenant', number(used[1]), math.floor(own)}
  end
  if most > 0 and number(used[2]) + bytes > most then
    return {'all', number(used[2]), math.floor(most)}
  end
end

-- Keeps the record of a response, unless its job has one; writes off what has expired either way.
-- KEYS record expiry totals cfg thr   ARGV tenant job record ttl_ms
-- -> {1, ''} kept | {1, the record that it has} | {0, 'tenant' | 'all', used, limit} no room
local function put_response(K, A)
  local known = redis.call('GET', K[1])
  if known then return {1, known} end
  local t, bytes = now(), #A[3] + RECORD_BYTES
  forget_records(K, t)
  local lack = lacks_record_room(K, A[1], bytes)
  if lack then return {0, unpack(lack)} end
  redis.call('SET', K[1], A[3], 'PX', A[4])
  redis.call('ZADD', K[2], t + tonumber(A[4]), bytes .. ' ' .. A[1] .. ' ' .. A[2])
  count_record(K[3], A[1], bytes)
  redis.call('PEXPIRE', K[2], tonumber(A[4]) + INDEX_SPARE_MS)
  redis.call('PEXPIRE', K[3], tonumber(A[4]) + INDEX_SPARE_MS)
  return {1, ''}
end

-- Lets a record go earlier.
-- KEYS record expiry   ARGV tenant job ttl_ms   -> 1 | 0 there is none, or it goes before
local function end_response(K, A)
  local size = redis.call('STRLEN', K[1])
  if size == 0 or redis.call('PEXPIRE', K[1], A[3], 'LT') == 0 then return 0 end
  local member = size + RECORD_BYTES .. ' ' .. A[1] .. ' ' .. A[2]
  redis.call('ZADD', K[2], 'XX', now() + tonumber(A[3]), member)
  return 1
end

-- Forgets a record now.
-- KEYS record expiry totals   ARGV tenant job   -> 1 | 0 there is none
local function drop_response(K, A)
  local bytes = redis.call('STRLEN', K[1]) + RECORD_BYTES
  if redis.call('ZREM', K[2], bytes .. ' ' .. A[1] .. ' ' .. A[2]) == 1 then
    count_record(K[3], A[1], -bytes)
  end
  return redis.call('DEL', K[1])
end
