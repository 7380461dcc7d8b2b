-- KEYS run wk wi cmd status kv md mds tok lib job1 job2 ...
-- ARGV worker lease_ms ttl_ms model_ttl_ms model, then per job: id fence
-- -> {1 still registered | 0 register again, id no longer this worker's, ...}
local function beat(K, A)
  local t = now()
  local reply = {redis.call('EXISTS', K[3]) * redis.call('EXISTS', K[7]) * redis.call('EXISTS', K[9])}
  local expiry = t + tonumber(A[2])
  redis.call('ZADD', K[2], expiry, A[1])
  for i = 3, 6 do redis.call('PEXPIRE', K[i], A[3]) end
  redis.call('PEXPIRE', K[7], A[4])
  redis.call('PEXPIRE', K[9], A[4])
  redis.call('ZADD', K[8], t + tonumber(A[4]), A[5])
  announce(K[10], t)
  local renewed = {}
  for i = 11, #K do
    local b = 6 + (i - 11) * 2
    local v = redis.call('HMGET', K[i], 'f', 'st', 'w')
    if v[1] == A[b + 1] and v[2] == 'run' and v[3] == A[1] then
      renewed[#renewed + 1] = expiry
      renewed[#renewed + 1] = A[b]
    else reply[#reply + 1] = A[b] end
  end
  if #renewed > 0 then redis.call('ZADD', K[1], 'XX', unpack(renewed)) end
  return reply
end

-- KEYS wk wi md mds tok lib
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
  announce(K[6], t)
  return 1
end

-- A worker's status, with what changed in its prefix cache and now and then all that is in it: one
-- entry, so that whoever reads the snapshot finds every later change in the stream.
-- KEYS status kv   ARGV status ttl_ms events snapshot (both may be '')   -> 1
local function report(K, A)
  local fields = {'s', A[1]}
  if A[3] ~= '' then fields[3], fields[4] = 'k', A[3] end
  redis.call('XADD', K[1], 'MAXLEN', '~', MAX_STATUSES, '*', unpack(fields))
  redis.call('PEXPIRE', K[1], A[2])
  if A[4] ~= '' then redis.call('SET', K[2], A[4], 'PX', A[2]) end
  return 1
end

-- Tells a worker which prefixes waiting jobs will use; one that never had a command caches none.
-- KEYS cmd   ARGV hints cmd_ttl_ms   -> 1 | 0 the worker has no commands
local function hint(K, A)
  if not redis.call('XADD', K[1], 'NOMKSTREAM', 'MAXLEN', '~', MAX_COMMANDS, '*',
    'k', 'hint', 'h', A[1]) then return 0 end
  redis.call('PEXPIRE', K[1], A[2])
  return 1
end

-- KEYS sch sche lib   ARGV scheduler lease_ms (0 resigns)   -> epoch | 0 another one leads
local function lead(K, A)
  local holder = redis.call('GET', K[1])
  if holder and holder ~= A[1] then return 0 end
  if A[2] == '0' then
    if holder then redis.call('DEL', K[1]) end
    return 0
  end
  redis.call('SET', K[1], A[1], 'PX', A[2])
  announce(K[3], now())
  if holder then return tonumber(redis.call('GET', K[2])) end
  return redis.call('INCR', K[2])
end

-- What the leader has measured: rates per second of jobs, tokens and bytes, the bound on waiting
-- bytes, how durable the server is that has this run id, the backlog, empty if it is unknown, and
-- the pace of full workers in jobs per second.
-- KEYS thr   ARGV rate_jobs rate_tokens rate_bytes max_bytes level run_id backlog pace   -> 1
local function measure(K, A)
  local backlog = A[7] and A[7] ~= '' and struct.pack('>d', now()) .. A[7] or ''
  redis.call('HSET', K[1], 'rj', A[1], 'rt', A[2], 'rb', A[3], 'mb', A[4], 'lv', A[5], 'rid', A[6],
    'bk', backlog, 'rp', A[8] or '')
  return 1
end

-- Takes a worker out, and tells which commands nobody has read, so that none is lost.
-- KEYS wk wi cmd status kv   ARGV worker cursor   -> the entries of cmd after the cursor
local function deregister(K, A)
  local unread = redis.call('XRANGE', K[3], '(' .. A[2], '+')
  redis.call('ZREM', K[1], A[1])
  redis.call('DEL', K[2], K[3], K[4], K[5])
  return unread
end

-- Reads streams as the only consumer of their group, in the name of an epoch: a leader that was
-- paused must not take entries away from its successor, who would never see them.  A function and
-- no transaction, because a server whose memory is full refuses those.  What was read before and
-- lies behind the position comes first, so that a call may be made again.
-- KEYS sche stream1 stream2 ...   ARGV epoch count position1 position2 ...
-- -> {now_ms, per stream: {entries} | {false, the server's error}}; error EPOCH
local function read_one(stream, position, max)
  local found = redis.pcall('XREADGROUP', 'GROUP', 'sched', 's', 'COUNT', max,
    'STREAMS', stream, position)
  if found and found.err then return {false, found.err} end
  return {found and found[1][2] or {}}
end

local function read(K, A)
  if redis.call('GET', K[1]) ~= A[1] then return redis.error_reply('EPOCH') end
  local reply = {now()}
  for i = 2, #K do
    reply[i] = read_one(K[i], A[i + 1], A[2])
    if reply[i][1] and #reply[i][1] == 0 then reply[i] = read_one(K[i], '>', A[2]) end
  end
  return reply
end

-- Takes entries off a stream that the group has read.
-- KEYS stream   ARGV entry1 entry2 ...   -> how many there were
local function acknowledge(K, A)
  redis.call('XACK', K[1], 'sched', unpack(A))
  return redis.call('XDEL', K[1], unpack(A))
end

-- Moves a pointer that nobody can read to the dead letters.
-- KEYS in dead   ARGV entry queue job reason   -> 1 moved | 0 was not there
local function bury(K, A)
  redis.call('XACK', K[1], 'sched', A[1])
  if redis.call('XDEL', K[1], A[1]) == 0 then return 0 end
  redis.call('XADD', K[2], 'MAXLEN', '~', MAX_LETTERS, '*',
    'j', A[3], 'r', A[4], 'q', A[2], 'e', A[1])
  return 1
end

-- KEYS in act   ARGV queue   -> 1 removed | 0 still has entries
local function retire(K, A)
  if redis.call('EXISTS', K[1]) == 1 and redis.call('XLEN', K[1]) > 0 then return 0 end
  redis.call('DEL', K[1])
  redis.call('ZREM', K[2], A[1])
  return 1
end

-- Deletes what is left of an ended job, and its idempotency key unless another job has it now.
local function forget(job, out, idem, jobs, id)
  redis.call('DEL', job, out)
  redis.call('ZREM', jobs, id)
  local known = redis.call('GET', idem)
  if known and string.match(known, ' (%S+)$') == id then redis.call('DEL', idem) end
end

-- Forgets ended jobs before their time, or settles the account of those whose time is over.
-- KEYS ended cnt, then per member: job out idem jobs
-- ARGV members ("<bytes> <id> <tenant>")   -> how many
local function trim(K, A)
  local num = 0
  for i = 1, #A do
    if redis.call('ZREM', K[1], A[i]) == 1 then
      num = num + 1
      local bytes, id = string.match(A[i], '^(%d+) (%S+)')
      count(K[2], 'rb', -tonumber(bytes))
      local state = redis.call('HGET', K[4 * i - 1], 'st')
      if not state or TERMINAL[state] then
        forget(K[4 * i - 1], K[4 * i], K[4 * i + 1], K[4 * i + 2], id)
      end
    end
  end
  return num
end

-- Takes a letter off the dead letters, with its job if that is given up (drop = 1).
-- KEYS dead job out ended cnt idem jobs   ARGV entry job_id drop   -> 1 | 0 was not there
local function drop_letter(K, A)
  local gone = redis.call('XDEL', K[1], A[1])
  if gone == 1 and A[3] == '1' and redis.call('HGET', K[2], 'st') == 'dead' then
    local texts = redis.call('HSTRLEN', K[2], 'req') + redis.call('HSTRLEN', K[2], 'meta')
    local bytes = kept_bytes(texts, redis.call('HSTRLEN', K[2], 'res'), redis.call('HGET', K[2], 'n'))
    local member = ended_member(bytes, A[2], redis.call('HGET', K[2], 'tn') or 'default')
    if redis.call('ZREM', K[4], member) == 1 then count(K[5], 'rb', -bytes) end
    forget(K[2], K[3], K[6], K[7], A[2])
  end
  return gone
end
