#!lua name=tm1
-- Tidemill's state changes, version 1.  Each function is one atomic move of one or more jobs.
-- Rules: time comes from TIME alone; every key is in KEYS; every function may be called again with
-- the same arguments (a lost reply is answered by a second call); at most 256 items a call.
--
-- Key types: job = hash, in = stream (group "sched"), act/run/wk/mds = sorted set, out = stream,
-- cmd = stream, idem = string, cnt/salt/wi/md = hash, sch/sche/tok = string, dead = stream.
-- Job fields: st state, tn tenant, md model, pr priority, qn queue, f fence, n tokens emitted,
-- at attempts, cl fence of the last attempt that its worker read, cn n at the dispatch, cr crashes
-- since the last new token, w worker, req request,
-- h routing key, cost tokens, eid pointer's entry id, ik idempotency key, salt, res result,
-- ts/td/tf/te submitted, dispatched, first token, ended (ms).

local SEAL = '9007199254740991'
local TERMINAL = {done = true, failed = true, cancelled = true, dead = true}

local function now()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function count(cnt, field, by)
  if redis.call('HINCRBY', cnt, field, by) == 0 then redis.call('HDEL', cnt, field) end
end

local function point(input, act, job, id, queue, bell)
  local v = redis.call('HMGET', job, 'h', 'cost', 'md', 'at', 'pr')
  if redis.call('EXISTS', input) == 0 then
    redis.call('XGROUP', 'CREATE', input, 'sched', '0', 'MKSTREAM')
  end
  local entry = redis.call('XADD', input, '*',
    'j', id, 'h', v[1], 'c', v[2], 'm', v[3], 'a', v[4], 'p', v[5])
  redis.call('HSET', job, 'st', 'queued', 'eid', entry)
  redis.call('ZADD', act, 'NX', now(), queue)
  redis.call('SPUBLISH', bell, queue)
end

-- Seals the token log, so that no later write to it can succeed, and starts every TTL.
local function seal(job, out, idem, n, state, start, chunk, ending, chan, log_ttl, job_ttl)
  local id = SEAL .. '-' .. n
  if chunk == '' then redis.call('XADD', out, id, 's', start, 'e', ending)
  else redis.call('XADD', out, id, 's', start, 'd', chunk, 'e', ending) end
  redis.call('HSET', job, 'st', state, 'n', n, 'te', now())
  redis.call('HDEL', job, 'req', 'eid')
  redis.call('PEXPIRE', out, log_ttl)
  redis.call('PEXPIRE', job, job_ttl)
  redis.call('PEXPIRE', idem, job_ttl)
  redis.call('SPUBLISH', chan, id .. ' ')
end

-- KEYS job in act idem cnt salt
-- ARGV id tenant queue model priority request routing_key cost body_sha max_queued idem_key bell v
-- -> {1, id} created | {0, id} existed already; errors CONFLICT, QUEUEFULL, NOSALT
local function submit(K, A)
  if redis.call('EXISTS', K[1]) == 1 then return {0, A[1]} end
  if A[11] ~= '' then
    local known = redis.call('GET', K[4])
    if known then
      local sha, id = string.match(known, '^(%S+) (%S+)$')
      if sha ~= A[9] then return redis.error_reply('CONFLICT ' .. id) end
      return {0, id}
    end
  end
  local salt = redis.call('HGET', K[6], A[2])
  if not salt then return redis.error_reply('NOSALT') end
  local queued = tonumber(redis.call('HGET', K[5], 'q:' .. A[2]) or '0')
  if queued >= tonumber(A[10]) then return redis.error_reply('QUEUEFULL ' .. queued) end
  if A[11] ~= '' then redis.call('SET', K[4], A[9] .. ' ' .. A[1]) end
  redis.call('HSET', K[1], 'tn', A[2], 'qn', A[3], 'md', A[4], 'pr', A[5], 'req', A[6], 'h', A[7],
    'cost', A[8], 'ik', A[11], 'v', A[13], 'salt', salt, 'f', 0, 'n', 0, 'at', 0, 'cn', 0, 'cr', 0,
    'w', '', 'ts', now())
  point(K[2], K[3], K[1], A[1], A[3], A[12])
  count(K[5], 'q:' .. A[2], 1)
  return {1, A[1]}
end

-- KEYS job in out run cmd sche cnt
-- ARGV id entry worker lease_ms epoch cmd_ttl_ms
-- -> {1, fence, command id} | {0, state, worker}; error EPOCH
local function dispatch(K, A)
  if redis.call('GET', K[6]) ~= A[5] then return redis.error_reply('EPOCH') end
  local v = redis.call('HMGET', K[1], 'st', 'n', 'tn', 'w')
  redis.call('XACK', K[2], 'sched', A[2])
  redis.call('XDEL', K[2], A[2])
  if v[1] ~= 'queued' then return {0, v[1] or 'gone', v[4] or ''} end
  local fence = redis.call('HINCRBY', K[1], 'f', 1)
  local t = now()
  redis.call('HSET', K[1], 'st', 'run', 'w', A[3], 'at', fence, 'cn', v[2], 'td', t)
  redis.call('XADD', K[3], fence .. '-' .. v[2], 'c', A[3])
  redis.call('ZADD', K[4], t + tonumber(A[4]), A[1])
  local command = redis.call('XADD', K[5], 'MAXLEN', '~', 10000, '*', 'k', 'run', 'j', A[1], 'f', fence)
  redis.call('PEXPIRE', K[5], A[6])
  count(K[7], 'q:' .. v[3], -1)
  count(K[7], 'r:' .. v[3], 1)
  return {1, fence, command}
end

-- A worker has read its run commands: from here on the attempts may crash it.
-- KEYS job1 job2 ...   ARGV worker fence1 fence2 ...   -> per job: 1 claimed | 0 not ours
local function claim(K, A)
  local reply = {}
  for i = 1, #K do
    local v = redis.call('HMGET', K[i], 'f', 'st', 'w')
    local ours = v[1] == A[i + 1] and v[2] == 'run' and v[3] == A[1]
    if ours then redis.call('HSET', K[i], 'cl', A[i + 1]) end
    reply[i] = ours and 1 or 0
  end
  return reply
end

local function append_one(job, out, fence, start, finish, chunk, chan)
  local v = redis.call('HMGET', job, 'f', 'n', 'st')
  if v[1] ~= fence or v[3] ~= 'run' then return -1 end
  if v[2] ~= start then return -2 - tonumber(v[2]) end
  local id = fence .. '-' .. finish
  redis.call('XADD', out, id, 's', start, 'd', chunk)
  redis.call('HSET', job, 'n', finish, 'cr', 0)
  redis.call('HSETNX', job, 'tf', now())
  redis.call('SPUBLISH', chan, id .. ' ' .. chunk)
  return 1
end

-- KEYS job1 out1 job2 out2 ...   ARGV per job: fence start end chunk channel
-- -> per job: 1 written | -1 no longer ours | -2-n the log holds n tokens | -1000000001 error
local function append(K, A)
  local reply = {}
  for i = 1, #K / 2 do
    local b = (i - 1) * 5
    -- One job's error must not undo its neighbours' tokens.
    local ok, result = pcall(append_one, K[2 * i - 1], K[2 * i],
      A[b + 1], A[b + 2], A[b + 3], A[b + 4], A[b + 5])
    reply[i] = ok and result or -1000000001
  end
  return reply
end

-- KEYS job out run cnt idem
-- ARGV id fence state start end chunk ending result channel log_ttl_ms job_ttl_ms
-- -> {1, state} | {0, state} was terminal | {-1, state} not ours | {-2-n, state} the log holds n
local function finish(K, A)
  local v = redis.call('HMGET', K[1], 'f', 'n', 'st', 'tn')
  if not v[3] then return {-1, 'gone'} end
  if TERMINAL[v[3]] then return {0, v[3]} end
  if v[1] ~= A[2] or v[3] ~= 'run' then return {-1, v[3]} end
  if v[2] ~= A[4] then return {-2 - tonumber(v[2]), v[3]} end
  redis.call('HSET', K[1], 'res', A[8])
  seal(K[1], K[2], K[5], A[5], A[3], A[4], A[6], A[7], A[9], A[10], A[11])
  redis.call('ZREM', K[3], A[1])
  count(K[4], 'r:' .. v[4], -1)
  return {1, A[3]}
end

-- Ends a job without a worker: cancelled by its owner, or failed by the scheduler.
-- KEYS job out run cnt idem in cmd
-- ARGV id worker state ending channel ttl_ms cmd_ttl_ms
-- -> {1, state} | {0, state} was terminal | {-1, 'gone'} | {-2, worker} it runs on another worker
local function cancel(K, A)
  local v = redis.call('HMGET', K[1], 'st', 'n', 'tn', 'eid', 'w', 'f')
  if not v[1] then return {-1, 'gone'} end
  if TERMINAL[v[1]] then return {0, v[1]} end
  if v[1] == 'run' and v[5] ~= A[2] then return {-2, v[5]} end
  if v[1] == 'queued' then
    redis.call('XACK', K[6], 'sched', v[4])
    redis.call('XDEL', K[6], v[4])
    count(K[4], 'q:' .. v[3], -1)
  else
    redis.call('XADD', K[7], 'MAXLEN', '~', 10000, '*', 'k', 'cancel', 'j', A[1], 'f', v[6])
    redis.call('PEXPIRE', K[7], A[7])
    redis.call('ZREM', K[3], A[1])
    count(K[4], 'r:' .. v[3], -1)
  end
  seal(K[1], K[2], K[5], v[2], A[3], v[2], '', A[4], A[5], A[6], A[6])
  return {1, A[3]}
end

-- Gives a running job back to the queue: by its worker on drain.
-- KEYS job in act run cnt   ARGV id fence queue bell
-- -> 1 | 0 not ours
local function release(K, A)
  local v = redis.call('HMGET', K[1], 'f', 'st', 'tn')
  if v[1] ~= A[2] or v[2] ~= 'run' then return 0 end
  redis.call('ZREM', K[4], A[1])
  point(K[2], K[3], K[1], A[1], A[3], A[4])
  count(K[5], 'r:' .. v[3], -1)
  count(K[5], 'q:' .. v[3], 1)
  return 1
end

-- KEYS run wk wi cmd status md mds tok job1 job2 ...
-- ARGV worker lease_ms ttl_ms model_ttl_ms model, then per job: id fence
-- -> {1 still registered | 0 register again, id no longer this worker's, ...}
local function beat(K, A)
  local t = now()
  local reply = {redis.call('EXISTS', K[3]) * redis.call('EXISTS', K[6]) * redis.call('EXISTS', K[8])}
  local expiry = t + tonumber(A[2])
  redis.call('ZADD', K[2], expiry, A[1])
  for i = 3, 5 do redis.call('PEXPIRE', K[i], A[3]) end
  redis.call('PEXPIRE', K[6], A[4])
  redis.call('PEXPIRE', K[8], A[4])
  redis.call('ZADD', K[7], t + tonumber(A[4]), A[5])
  for i = 9, #K do
    local b = 6 + (i - 9) * 2
    local v = redis.call('HMGET', K[i], 'f', 'st')
    if v[1] == A[b + 1] and v[2] == 'run' then redis.call('ZADD', K[1], 'XX', expiry, A[b])
    else reply[#reply + 1] = A[b] end
  end
  return reply
end

-- KEYS job in act run cnt out idem dead
-- ARGV id queue max_crashes ending channel ttl_ms bell
-- -> 1 requeued | 2 dead | 0 nothing to do
local function reap(K, A)
  local expiry = redis.call('ZSCORE', K[4], A[1])
  if not expiry or tonumber(expiry) > now() then return 0 end
  redis.call('ZREM', K[4], A[1])
  local v = redis.call('HMGET', K[1], 'st', 'n', 'cn', 'tn', 'w', 'at', 'cl')
  if v[1] ~= 'run' then return 0 end
  count(K[5], 'r:' .. v[4], -1)
  -- An attempt that no worker has read can have crashed none.
  local crashes = 0
  if v[2] ~= v[3] then redis.call('HSET', K[1], 'cr', 0)
  elseif v[6] == v[7] then crashes = redis.call('HINCRBY', K[1], 'cr', 1) end
  if crashes >= tonumber(A[3]) then
    seal(K[1], K[6], K[7], v[2], 'dead', v[2], '', A[4], A[5], A[6], A[6])
    redis.call('XADD', K[8], 'MAXLEN', '~', 10000, '*',
      'j', A[1], 'r', 'crashed its workers', 'a', v[6], 'w', v[5])
    return 2
  end
  point(K[2], K[3], K[1], A[1], A[2], A[7])
  count(K[5], 'q:' .. v[4], 1)
  return 1
end

-- KEYS status   ARGV status ttl_ms   -> 1
local function report(K, A)
  redis.call('XADD', K[1], 'MAXLEN', '~', 1000, '*', 's', A[1])
  redis.call('PEXPIRE', K[1], A[2])
  return 1
end

-- Moves a pointer that nobody can read to the dead letters.
-- KEYS in dead   ARGV entry queue job reason   -> 1 moved | 0 was not there
local function bury(K, A)
  redis.call('XACK', K[1], 'sched', A[1])
  if redis.call('XDEL', K[1], A[1]) == 0 then return 0 end
  redis.call('XADD', K[2], 'MAXLEN', '~', 10000, '*', 'j', A[3], 'r', A[4], 'q', A[2], 'e', A[1])
  return 1
end

-- KEYS in act   ARGV queue   -> 1 removed | 0 still has entries
local function retire(K, A)
  if redis.call('EXISTS', K[1]) == 1 and redis.call('XLEN', K[1]) > 0 then return 0 end
  redis.call('DEL', K[1])
  redis.call('ZREM', K[2], A[1])
  return 1
end

-- KEYS sch sche   ARGV scheduler lease_ms (0 resigns)   -> epoch | 0 another one leads
local function lead(K, A)
  local holder = redis.call('GET', K[1])
  if holder and holder ~= A[1] then return 0 end
  if A[2] == '0' then
    if holder then redis.call('DEL', K[1]) end
    return 0
  end
  redis.call('SET', K[1], A[1], 'PX', A[2])
  if holder then return tonumber(redis.call('GET', K[2])) end
  return redis.call('INCR', K[2])
end

-- KEYS salt   ARGV tenant random   -> the tenant's salt; the first caller's random bytes win
local function salt(K, A)
  redis.call('HSETNX', K[1], A[1], A[2])
  return redis.call('HGET', K[1], A[1])
end

-- KEYS wk wi md mds tok
-- ARGV worker lease_ms ttl_ms model_ttl_ms model info card tokenizer   -> 1
local function register(K, A)
  local t = now()
  redis.call('ZADD', K[1], t + tonumber(A[2]), A[1])
  redis.call('HSET', K[2], 'info', A[6])
  redis.call('PEXPIRE', K[2], A[3])
  redis.call('HSET', K[3], 'card', A[7])
  redis.call('PEXPIRE', K[3], A[4])
  redis.call('ZADD', K[4], t + tonumber(A[4]), A[5])
  redis.call('SET', K[5], A[8], 'PX', A[4])
  return 1
end

local function register_function(name, callback, flags)
  redis.register_function{function_name = 'tm1_' .. name, callback = callback, flags = flags}
end

-- At maxmemory submits are refused while everything that drains the system goes on.
register_function('submit', submit, {})
register_function('salt', salt, {})
register_function('dispatch', dispatch, {'allow-oom'})
register_function('claim', claim, {'allow-oom'})
register_function('append', append, {'allow-oom'})
register_function('finish', finish, {'allow-oom'})
register_function('cancel', cancel, {'allow-oom'})
register_function('release', release, {'allow-oom'})
register_function('beat', beat, {'allow-oom'})
register_function('reap', reap, {'allow-oom'})
register_function('report', report, {'allow-oom'})
register_function('bury', bury, {'allow-oom'})
register_function('retire', retire, {'allow-oom'})
register_function('lead', lead, {'allow-oom'})
register_function('register', register, {'allow-oom'})
