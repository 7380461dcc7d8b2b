-- Every function that can end a job has these keys first:
-- K[1..16] = job out run dly due cnt idem ended dead batch members cfg back thr ev wh
local NUM_ENDING_KEYS = 16

-- What an ended job takes besides its texts and its stored result: fields, its token log, its place
-- in the indexes.
local BYTES_PER_JOB = 500
local BYTES_PER_TOKEN = 8

-- What an ended job keeps of the server's memory, the same as long as it is known; texts are its
-- request, if that is kept, and its metadata.
local function kept_bytes(text_bytes, result_bytes, num_tokens)
  return BYTES_PER_JOB + text_bytes + result_bytes + BYTES_PER_TOKEN * number(num_tokens)
end

-- Its place in the index of ended jobs.
local function ended_member(bytes, id, tenant)
  return bytes .. ' ' .. id .. ' ' .. tenant
end

-- Takes a job that ends off the index of its state; its pointer is the caller's.
local function leave(K, id, v)
  if v.st == 'run' then
    redis.call('ZREM', K[3], id)
    count(K[6], 'r:' .. v.tn, -1)
  else
    if v.st == 'delayed' then redis.call('ZREM', K[4], id) end
    count_queued(K[6], v.tn, v.tk, -1)
  end
  if v.dl ~= 0 or v.qdl ~= 0 or v.sm ~= 0 then redis.call('ZREM', K[5], id) end
end

local function leave_batch(K, id, v, state)
  if not v.bid or v.bid == '' then return end
  redis.call('HINCRBY', K[10], state, 1)
  redis.call('SREM', K[11], id)
  if redis.call('EXISTS', K[11]) == 0 then redis.call('PEXPIRE', K[10], BATCH_TTL_MS) end
end

-- One entry at the tenant's back door, if it has one.
local function tell(K, id, v, e, t)
  local max = redis.call('HMGET', K[12], 'back:' .. v.tn, 'back:*')
  local bound = setting(max[1]) or setting(max[2]) or 0
  if bound == 0 then return end
  redis.call('XADD', K[13], 'MAXLEN', '~', bound, '*', 'j', id, 's', e.state, 'r', e.reason,
    'n', e.n, 'b', v.bid or '', 'k', v.ik or '', 't', t)
  redis.call('PEXPIRE', K[13], e.back_ttl)
end

-- One entry in the outbox of webhooks, if anybody wants to hear of the job; of a line of a batch
-- object nobody does but its own callback.
local function tell_webhooks(K, id, v, e, t)
  local is_line = is_batch_line(v.bid, v.ik)
  if v.wh == '' and is_line then return end
  put_event(K[15], K[16], v.wh, {'j', id, 's', e.state, 'r', e.reason, 'tn', v.tn, 't', t,
    unpack(without_defaults('m', v.meta, 'l', is_line and 1 or 0))})
end

-- Ends a job for good: seals the token log, so that no later write to it can succeed, takes the job
-- off every index and starts every TTL.  e = {state, reason, n, start, chunk, ending, result,
-- channel, log_ttl, job_ttl, back_ttl, is_work}; chunk and result may be ''.  Only what a worker
-- brought to its end shows how fast workers are: is_work.
local function seal(K, id, v, e)
  local t, entry = now(), SEAL .. '-' .. e.n
  -- First the one write that the server could refuse.
  if e.chunk == '' then redis.call('XADD', K[2], entry, 's', e.start, 'e', e.ending)
  else redis.call('XADD', K[2], entry, 's', e.start, 'd', e.chunk, 'e', e.ending) end
  leave(K, id, v)
  local request_bytes = redis.call('HSTRLEN', K[1], 'req')
  count(K[6], 'qb', -request_bytes - #v.meta)
  if e.result == '' then redis.call('HSET', K[1], 'st', e.state, 'n', e.n, 'te', t)
  else redis.call('HSET', K[1], 'st', e.state, 'n', e.n, 'te', t, 'res', e.result) end
  -- A dead job keeps its request, for whoever requeues it.
  redis.call('HDEL', K[1], 'eid', e.state == 'dead' and 'eid' or 'req')
  redis.call('PEXPIRE', K[2], e.log_ttl)
  redis.call('PEXPIRE', K[1], e.job_ttl)
  if v.ik and v.ik ~= '' then redis.call('PEXPIRE', K[7], e.job_ttl) end
  local bytes = kept_bytes((e.state == 'dead' and request_bytes or 0) + #v.meta, #e.result, e.n)
  if redis.call('ZADD', K[8], t + e.job_ttl, ended_member(bytes, id, v.tn)) == 1 then
    count(K[6], 'rb', bytes)
  end
  redis.call('HINCRBY', K[14], 'e', 1)
  if e.is_work then
    redis.call('HINCRBY', K[14], 'j', 1)
    redis.call('HINCRBY', K[14], 't', number(v.tk))
    redis.call('HINCRBY', K[14], 'b', request_bytes + #v.meta)
  end
  leave_batch(K, id, v, e.state)
  tell(K, id, v, e, t)
  tell_webhooks(K, id, v, e, t)
  redis.call('SPUBLISH', e.channel, entry .. ' ')
end

-- The ending with what the job used, where a worker had it: its prompt, which may have been computed,
-- and the tokens of its log.
local function with_usage(job, v, ending)
  local prompt = number(v.f) > 0 and setting(redis.call('HGET', job, 'cost')) or 0
  local told = setting(v.n) or 0
  if prompt + told == 0 then return ending end
  local is_read, fields = pcall(cmsgpack.unpack, string.sub(ending, 2))
  if not is_read or type(fields) ~= 'table' or fields.usage then return ending end
  fields.usage = {prompt_tokens = prompt, completion_tokens = told}
  return string.sub(ending, 1, 1) .. cmsgpack.pack(fields)
end

-- An ending without a worker: what was produced so far stays in the token log, for as long as the
-- job is known.  times = {job_ttl, back_ttl}
local function cut_off(K, id, v, state, reason, ending, channel, times)
  seal(K, id, v, {state = state, reason = reason, n = v.n, start = v.n, chunk = '',
    ending = with_usage(K[1], v, ending), result = '', channel = channel, log_ttl = times[1],
    job_ttl = times[1], back_ttl = times[2]})
end

local function bury_job(K, id, v, reason, ending, channel, times)
  cut_off(K, id, v, 'dead', 'error', ending, channel, times)
  redis.call('XADD', K[9], 'MAXLEN', '~', MAX_LETTERS, '*',
    'j', id, 'r', reason, 'a', v.at or 0, 'w', v.w or '', 't', v.tn)
end

-- Takes a job that is not to run any more from wherever it is; K[17] = in, K[18] = cmd.
local function withdraw(K, id, v, cmd_ttl)
  if v.st == 'queued' then
    redis.call('XACK', K[17], 'sched', v.eid)
    redis.call('XDEL', K[17], v.eid)
  elseif v.st == 'run' then
    command(K[18], 'cancel', id, v.f, cmd_ttl)
  end
end

-- KEYS ending keys
-- ARGV id fence worker state reason start end chunk ending result channel log_ttl_ms job_ttl_ms
--      back_ttl_ms
-- -> {1, state} | {0, state} was terminal | {-1, state} not ours | {-2-n, state} the log holds n
local function finish(K, A)
  local v = load_job(K[1])
  if not v.st then return {-1, 'gone'} end
  if TERMINAL[v.st] then return {0, v.st} end
  if v.f ~= A[2] or v.w ~= A[3] or v.st ~= 'run' then return {-1, v.st} end
  if v.n ~= A[6] then return {-2 - tonumber(v.n), v.st} end
  seal(K, A[1], v, {state = A[4], reason = A[5], start = A[6], n = A[7], chunk = A[8],
    ending = A[9], result = A[10], channel = A[11], log_ttl = A[12], job_ttl = A[13],
    back_ttl = A[14], is_work = A[4] == 'done' or A[4] == 'failed'})
  return {1, A[4]}
end

-- Ends a job without a worker: cancelled by its owner, or failed by the scheduler.
-- KEYS ending keys, in cmd
-- ARGV id worker state reason ending channel ttl_ms back_ttl_ms cmd_ttl_ms
-- -> {1, state} | {0, state} was terminal | {-1, 'gone'} | {-2, worker} it runs on another worker
local function cancel(K, A)
  local v = load_job(K[1])
  if not v.st then return {-1, 'gone'} end
  if TERMINAL[v.st] then return {0, v.st} end
  if v.st == 'run' and v.w ~= A[2] then return {-2, v.w} end
  withdraw(K, A[1], v, A[9])
  cut_off(K, A[1], v, A[3], A[4], A[5], A[6], {A[7], A[8]})
  return {1, A[3]}
end

-- Fails a job that cannot run, in the name of an epoch: an old leader's view may be outdated.
-- KEYS ending keys, in cmd sche   ARGV as cancel, epoch   -> as cancel; error EPOCH
local function refuse(K, A)
  if redis.call('GET', K[19]) ~= A[10] then return redis.error_reply('EPOCH') end
  return cancel(K, A)
end

-- Which time limit of a job has passed, '' if none.
local function limit_passed(v, t)
  if v.dl ~= 0 and v.dl <= t then return 'deadline' end
  if v.st ~= 'run' and number(v.f) == 0 and v.qdl ~= 0 and v.qdl <= t then return 'queue_timeout' end
  if v.st == 'run' and v.sm ~= 0 and math.max(v.td, v.tp) + v.sm <= t then return 'stalled' end
  return ''
end

-- Ends a job whose time is over, or notes when to look at it again.
-- KEYS ending keys, in cmd
-- ARGV id worker deadline_ending queue_timeout_ending stalled_ending channel ttl_ms back_ttl_ms
--      cmd_ttl_ms
-- -> the finish reason | '' not due | 'moved' it runs on another worker
local function expire(K, A)
  local due, t = redis.call('ZSCORE', K[5], A[1]), now()
  if not due or tonumber(due) > t then return '' end
  local v = load_job(K[1])
  if not v.st or TERMINAL[v.st] then
    redis.call('ZREM', K[5], A[1])
    return ''
  end
  local reason = limit_passed(v, t)
  if reason == '' then
    local later = next_due(v)
    if later == 0 then redis.call('ZREM', K[5], A[1])
    else redis.call('ZADD', K[5], later, A[1]) end
    return ''
  end
  if v.st == 'run' and v.w ~= A[2] then return 'moved' end
  local endings = {deadline = A[3], queue_timeout = A[4], stalled = A[5]}
  withdraw(K, A[1], v, A[9])
  cut_off(K, A[1], v, 'expired', reason, endings[reason], A[6], {A[7], A[8]})
  return reason
end

-- Gives a job back after an error that may pass: it waits longer each time, at most until its
-- deadline, and is dead when its retries are used up.
-- KEYS ending keys
-- ARGV id fence worker error base_ms cap_ms jitter(0..1) dead_ending deadline_ending channel
--      ttl_ms dead_ttl_ms back_ttl_ms
-- -> {1, ready_ms} delayed | {2, 0} dead | {3, 0} expired | {0, 0} not ours
local function nack(K, A)
  local v = load_job(K[1])
  if v.f ~= A[2] or v.w ~= A[3] or v.st ~= 'run' then return {0, 0} end
  redis.call('HSET', K[1], 'err', A[4])
  if v.rt >= v.mx then
    bury_job(K, A[1], v, A[4], A[8], A[10], {A[12], A[13]})
    return {2, 0}
  end
  local pause = math.min(number(A[6]), number(A[5]) * 2 ^ math.min(v.rt, 30)) * number(A[7])
  local t = now()
  local ready = t + math.ceil(pause)
  if v.dl ~= 0 and ready >= v.dl then
    cut_off(K, A[1], v, 'expired', 'deadline', A[9], A[10], {A[11], A[13]})
    return {3, 0}
  end
  redis.call('ZREM', K[3], A[1])
  redis.call('ZADD', K[4], ready, A[1])
  redis.call('HSET', K[1], 'st', 'delayed', 'rt', v.rt + 1)
  -- A retry is no crash, whatever the attempt's worker does from here on.
  redis.call('HSET', K[1], 'cr', 0)
  count(K[6], 'r:' .. v.tn, -1)
  count_queued(K[6], v.tn, v.tk, 1)
  return {1, ready}
end

-- KEYS ending keys, in act
-- ARGV id queue max_crashes ending channel ttl_ms back_ttl_ms bell
-- -> 1 requeued | 2 dead | 0 nothing to do
local function reap(K, A)
  local expiry = redis.call('ZSCORE', K[3], A[1])
  if not expiry or tonumber(expiry) > now() then return 0 end
  local v = load_job(K[1])
  if v.st ~= 'run' then
    redis.call('ZREM', K[3], A[1])
    return 0
  end
  -- An attempt that no worker has read can have crashed none.
  local crashes = 0
  if v.n ~= v.cn then redis.call('HSET', K[1], 'cr', 0)
  elseif v.at == v.cl then crashes = redis.call('HINCRBY', K[1], 'cr', 1) end
  if crashes >= tonumber(A[3]) then
    bury_job(K, A[1], v, 'crashed its workers', A[4], A[5], {A[6], A[7]})
    return 2
  end
  redis.call('ZREM', K[3], A[1])
  count(K[6], 'r:' .. v.tn, -1)
  count_queued(K[6], v.tn, v.tk, 1)
  point(K[17], K[18], K[1], A[1], A[2], A[8])
  return 1
end
