-- KEYS job in out run due cmd sche cnt
-- ARGV id entry worker lease_ms epoch cmd_ttl_ms
-- -> {1, fence, command id} | {0, state, worker}; error EPOCH
local function dispatch(K, A)
  if redis.call('GET', K[7]) ~= A[5] then return redis.error_reply('EPOCH') end
  local v, t = load_job(K[1]), now()
  -- Its pointer stays, for the function that ends it.
  if v.st == 'queued' and limit_passed(v, t) ~= '' then return {0, 'expired', ''} end
  local fence = number(v.f) + 1
  -- First the only write that the server may refuse: a log must not hold a later entry.
  if v.st == 'queued' then redis.call('XADD', K[3], fence .. '-' .. v.n, 'c', A[3]) end
  redis.call('XACK', K[2], 'sched', A[2])
  redis.call('XDEL', K[2], A[2])
  if v.st ~= 'queued' then return {0, v.st or 'gone', v.w or ''} end
  redis.call('HSET', K[1], 'st', 'run', 'f', fence, 'w', A[3], 'at', fence, 'cn', v.n, 'td', t)
  redis.call('ZADD', K[4], t + tonumber(A[4]), A[1])
  if v.sm ~= 0 then redis.call('ZADD', K[5], 'LT', t + v.sm, A[1]) end
  local entry = command(K[6], 'run', A[1], fence, A[6])
  count_queued(K[8], v.tn, v.tk, -1)
  count(K[8], 'r:' .. v.tn, 1)
  return {1, fence, entry}
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

local function append_one(job, out, worker, fence, start, finish, chunk, chan, t)
  local v = redis.call('HMGET', job, 'f', 'n', 'st', 'w', 'cr', 'sm')
  if v[1] ~= fence or v[3] ~= 'run' or v[4] ~= worker then return -1 end
  if v[2] ~= start then return -2 - tonumber(v[2]) end
  local id = fence .. '-' .. finish
  redis.call('XADD', out, id, 's', start, 'd', chunk)
  -- Most chunks change the number of tokens alone, which keeps them cheap.
  if start == '0' then redis.call('HSET', job, 'n', finish, 'cr', 0, 'tp', t, 'tf', t)
  elseif v[5] ~= '0' or v[6] then redis.call('HSET', job, 'n', finish, 'cr', 0, 'tp', t)
  else redis.call('HSET', job, 'n', finish) end
  redis.call('SPUBLISH', chan, id .. ' ' .. chunk)
  return 1
end

-- KEYS job1 out1 job2 out2 ...   ARGV worker, then per job: fence start end chunk channel
-- -> per job: 1 written | -1 no longer ours | -2-n the log holds n tokens | -1000000001 error
local function append(K, A)
  local reply, t = {}, now()
  for i = 1, #K / 2 do
    local b = (i - 1) * 5 + 1
    -- One job's error must not undo its neighbours' tokens.
    local ok, result = pcall(append_one, K[2 * i - 1], K[2 * i],
      A[1], A[b + 1], A[b + 2], A[b + 3], A[b + 4], A[b + 5], t)
    reply[i] = ok and result or -1000000001
  end
  return reply
end

-- Gives a running job back to the queue: by its worker on drain.
-- KEYS job in act run cnt   ARGV id fence worker queue bell
-- -> 1 | 0 not ours
local function release(K, A)
  local v = load_job(K[1])
  if v.f ~= A[2] or v.w ~= A[3] or v.st ~= 'run' then return 0 end
  redis.call('ZREM', K[4], A[1])
  count(K[5], 'r:' .. v.tn, -1)
  count_queued(K[5], v.tn, v.tk, 1)
  point(K[2], K[3], K[1], A[1], A[4], A[5])
  return 1
end

-- Lets a delayed job run whose time has come.
-- KEYS job in act dly   ARGV id queue bell   -> 1 | 0 not due
local function promote(K, A)
  local ready = redis.call('ZSCORE', K[4], A[1])
  if not ready or tonumber(ready) > now() then return 0 end
  redis.call('ZREM', K[4], A[1])
  if redis.call('HGET', K[1], 'st') ~= 'delayed' then return 0 end
  point(K[2], K[3], K[1], A[1], A[2], A[3])
  return 1
end
