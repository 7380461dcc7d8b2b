local MIN_RETRY_MS = 100
local MAX_RETRY_MS = 60000
local DEFAULT_RETRY_MS = 1000
local BATCH_TTL_MS = 30 * 86400000
-- What the leader tells of the backlog holds for so long.
local BACKLOG_MS = 10000
local MAX_WAIT_MS = 1e15
local BACKLOG = '>dddddddddddddd'
local BACKLOG_BYTES = 14 * 8
-- Where the numbers of p0, p1 and p2 begin.
local CLASS_AT = {[48] = 3, [49] = 7, [50] = 11}
-- Of an entry of the front door that is kept as a dead letter.
local MAX_LETTER_BODY = 16384

-- How long until ``over`` units are gone at a measured rate per second.
local function retry_ms(over, rate)
  if not rate or number(rate) <= 0 then return DEFAULT_RETRY_MS end
  return math.max(MIN_RETRY_MS, math.min(MAX_RETRY_MS, math.ceil(1000 * over / number(rate))))
end

local function limits_of(cfg, tenant)
  local v = redis.call('HMGET', cfg, 'jobs:' .. tenant, 'jobs:*', 'tokens:' .. tenant, 'tokens:*',
    'rpm:' .. tenant, 'rpm:*', 'tpm:' .. tenant, 'tpm:*', 'bytes',
    'weight:' .. tenant, 'weight:*')
  local function own_or_common(i) return setting(v[i]) or setting(v[i + 1]) end
  return {jobs = own_or_common(1), tokens = own_or_common(3), rpm = own_or_common(5),
    tpm = own_or_common(7), bytes = setting(v[9]),
    weight = weight(v[10]) or weight(v[11]) or 1}
end

local function read_counts(cnt, tenant)
  local v = redis.call('HMGET', cnt, 'q:' .. tenant, 'qt:' .. tenant, 'qb')
  return {number(v[1]), number(v[2]), number(v[3])}
end

-- Counts a new job in; one HSET costs less than an HINCRBY of each, in the append-only file as well.
local function count_new(cnt, tenant, counts, bytes, tokens)
  local values = {'q:' .. tenant, counts[1] + 1, 'qb', counts[3] + bytes}
  if tokens ~= 0 then
    values[5] = 'qt:' .. tenant
    values[6] = counts[2] + tokens
  end
  redis.call('HSET', cnt, unpack(values))
end

-- Why the queue has no room for a job of so many bytes and tokens; nil if it has.
-- counts = {jobs, tokens, bytes} that wait; rates = {jobs, tokens, bytes, max_bytes}
local function lacks_room(counts, rates, limits, bytes, tokens)
  local queued, waiting, used = counts[1], counts[2], counts[3]
  local max_bytes = limits.bytes or tonumber(rates[4] or nil)
  if max_bytes and max_bytes > 0 and used > 0 and used + bytes > max_bytes then
    return 'QUEUEFULL bytes ' .. used .. ' ' .. retry_ms(used + bytes - max_bytes, rates[3])
  end
  if queued >= limits.jobs then
    return 'QUEUEFULL jobs ' .. queued .. ' ' .. retry_ms(queued + 1 - limits.jobs, rates[1])
  end
  -- A job that is larger than the limit may still run alone.
  if limits.tokens and waiting > 0 and waiting + tokens > limits.tokens then
    return 'QUEUEFULL tokens ' .. waiting .. ' ' ..
      retry_ms(waiting + tokens - limits.tokens, rates[2])
  end
end

local function refill(have, per_minute, elapsed)
  return math.min(per_minute, (tonumber(have or nil) or per_minute) + per_minute * elapsed / 60000)
end

-- Takes requests and their tokens from a tenant's or a key's buckets, or gives tokens back (tokens
-- < 0); else says for how long they lack.  -> refusal or nil, {r, t} what is left then
local function take_rate(rl, limits, requests, tokens, t)
  if not (limits.rpm or limits.tpm) then return nil, {} end
  local v = redis.call('HMGET', rl, 'r', 't', 'at')
  local elapsed = math.max(0, t - (tonumber(v[3] or nil) or t))
  local values, wait, which, full, rest = {'at', t}, 0, '', 1, {}
  local function take(field, have, per_minute, need, name)
    if not per_minute then return end
    rest[field] = 0
    if per_minute <= 0 then
      wait, which = MAX_RETRY_MS, name .. ' 0'
      return
    end
    local left = refill(have, per_minute, elapsed)
    rest[field] = left
    local lack = need < 0 and 0 or math.min(need, per_minute) - left
    if lack > 0 and lack * 60000 / per_minute > wait then
      wait, which = math.ceil(lack * 60000 / per_minute), name .. ' ' .. per_minute
    end
    left = math.min(per_minute, left - need)
    full = math.max(full, math.ceil((per_minute - left) * 60000 / per_minute))
    values[#values + 1] = field
    values[#values + 1] = string.format('%.4f', left)
  end
  take('r', v[1], limits.rpm, requests, 'rpm')
  take('t', v[2], limits.tpm, tokens, 'tpm')
  if wait > 0 then return 'RATELIMITED ' .. which .. ' ' .. wait, rest end
  for i = 3, #values, 2 do rest[values[i]] = tonumber(values[i + 1]) end
  redis.call('HSET', rl, unpack(values))
  -- A bucket that is full again says nothing; one in debt must not be forgotten before.
  redis.call('PEXPIRE', rl, full)
  return nil, rest
end

-- The mean work of a job of the class at v[at], else of any class; nil if no job is known.
local function mean_work(v, at)
  if v[at + 1] > 0 then return v[at] / v[at + 1] end
  local jobs = v[4] + v[8] + v[12]
  if jobs > 0 then return (v[3] + v[7] + v[11]) / jobs end
end

-- How long a job that joins a queue now is likely to wait there; -1 if that is unknown.
-- told = ms, work per second, then work, jobs, tenants and weight of each class; new = {prompt
-- tokens, tokens of a waiting job of the tenant, its weight}; see waiting_seconds in
-- tidemill_scheduler.policy.waiting_times, which this repeats.
local function waiting_ms(told, t, queue, input, new)
  if not told or #told ~= BACKLOG_BYTES then return -1 end
  local v = {struct.unpack(BACKLOG, told)}
  if t - v[1] > BACKLOG_MS or v[2] <= 0 then return -1 end
  local at = CLASS_AT[string.byte(queue, 2)]
  local own_jobs, prompt = redis.call('XLEN', input), new[1]
  -- More of the tenant's jobs than the class had when that was told came since.
  local own = own_jobs * (mean_work(v, at) or 1 + new[2]) + prompt
  local others = v[at + 2] - (own_jobs > 0 and 1 or 0)
  local served = math.min(math.max(v[at] + prompt, own),
    own * (1 + math.max(0, others) / new[3]))
  local total, round = served, served / v[at + 3]
  for other = 3, 11, 4 do
    if other ~= at then total = total + math.min(v[other], round * v[other + 3]) end
  end
  local ms = 1000 * total / v[2]
  return ms >= 0 and ms <= MAX_WAIT_MS and math.floor(ms + 0.5) or -1
end

-- A batch lives until its last job has ended, and then for a while.
local function join_batch(batch, members, id)
  redis.call('HINCRBY', batch, 'total', 1)
  redis.call('PERSIST', batch)
  redis.call('SADD', members, id)
end

-- KEYS job in act idem cnt salt cfg thr rl dly due batch members lib jobs
-- ARGV id tenant queue model priority request routing_key cost tokens body_sha max_queued idem_key
--      bell v delay_ms not_before_ms deadline_ms max_queue_ms stall_ms max_retries batch parent
--      max_output hint_depth callback_url num_outputs metadata
-- -> {1, id, level, run_id, wait_ms} created | {0, id, level, run_id, -1} existed already
-- errors CONFLICT id, NOSALT, BATCHCLOSED, QUEUEFULL what used retry_ms,
--        RATELIMITED what limit retry_ms
local function submit(K, A)
  local measured = redis.call('HMGET', K[8], 'rj', 'rt', 'rb', 'mb', 'lv', 'rid', 'bk')
  local level, run_id = measured[5] or '', measured[6] or ''
  if redis.call('EXISTS', K[1]) == 1 then return {0, A[1], level, run_id, -1} end
  if A[12] ~= '' then
    local known = redis.call('GET', K[4])
    if known then
      local sha, id = string.match(known, '^(%S+) (%S+)$')
      if sha ~= A[10] then return redis.error_reply('CONFLICT ' .. id) end
      return {0, id, level, run_id, -1}
    end
  end
  local salt = redis.call('HGET', K[6], A[2])
  if not salt then return redis.error_reply('NOSALT') end
  if A[21] ~= '' and redis.call('HGET', K[12], 'st') then
    return redis.error_reply('BATCHCLOSED ' .. A[21])
  end
  local t, limits = now(), limits_of(K[7], A[2])
  limits.jobs = limits.jobs or tonumber(A[11])
  local tokens, counts, bytes = number(A[9]), read_counts(K[5], A[2]), #A[6] + #A[27]
  local refusal = lacks_room(counts, measured, limits, bytes, tokens)
    or take_rate(K[9], limits, 1, tokens, t)
  if refusal then return redis.error_reply(refusal) end

  local function after(ms) return number(ms) == 0 and 0 or t + number(ms) end
  local ready = math.max(after(A[15]), number(A[16]))
  local v = {st = ready > t and 'delayed' or 'queued', f = 0, dl = after(A[17]), qdl = 0,
    sm = number(A[19]), td = 0, tp = 0}
  local wait = waiting_ms(measured[7], t, A[3], K[2],
    {number(A[8]), (counts[2] + tokens) / (counts[1] + 1), limits.weight})
  if wait >= 0 then wait = wait + math.max(0, ready - t) end
  -- A delayed job's time in the queue begins when it may run.
  if number(A[18]) > 0 then v.qdl = math.max(t, ready) + number(A[18]) end
  if A[12] ~= '' then redis.call('SET', K[4], A[10] .. ' ' .. A[1]) end
  local entry = ''
  if v.st == 'delayed' then redis.call('ZADD', K[10], ready, A[1])
  else
    entry = add_pointer(K[2], K[3], A[1], A[3], A[13], t,
      {A[7], A[8], A[4], 0, A[5], A[23], v.dl, A[24], A[26]})
  end
  redis.call('HSET', K[1], 'st', v.st, 'tn', A[2], 'qn', A[3], 'md', A[4], 'pr', A[5], 'req', A[6],
    'h', A[7], 'cost', A[8], 'tk', A[9], 'ik', A[12], 'v', A[14], 'salt', salt, 'f', 0, 'n', 0,
    'at', 0, 'cn', 0, 'cr', 0, 'w', '', 'eid', entry, 'mx', A[20], 'ts', t,
    unpack(without_defaults('bid', A[21], 'par', A[22], 'dl', v.dl, 'qdl', v.qdl, 'sm', v.sm,
      'mt', number(A[23]), 'g', number(A[24]), 'wh', A[25],
      'ns', number(A[26]), 'meta', A[27])))
  local due = next_due(v)
  if due ~= 0 then redis.call('ZADD', K[11], due, A[1]) end
  count_new(K[5], A[2], counts, bytes, tokens)
  if A[21] ~= '' then join_batch(K[12], K[13], A[1]) end
  if not is_batch_line(A[21], A[12]) then redis.call('ZADD', K[15], 0, A[1]) end
  announce(K[14], t)
  return {1, A[1], level, run_id, wait}
end

-- Submits what an entry of the front door asks for, unless that was answered or another one leads:
-- a leader that was paused must not submit again what its successor has dealt with.
-- KEYS as submit, sche front   ARGV as submit, epoch entry
-- -> as submit | {-1} there is no such entry; errors as submit, EPOCH
local function admit(K, A)
  if redis.call('GET', K[16]) ~= A[28] then return redis.error_reply('EPOCH') end
  if #redis.call('XRANGE', K[17], A[29], A[29]) == 0 then return {-1} end
  return submit(K, A)
end

-- KEYS salt   ARGV tenant random   -> the tenant's salt; the first caller's random bytes win
local function salt(K, A)
  redis.call('HSETNX', K[1], A[1], A[2])
  return redis.call('HGET', K[1], A[1])
end

-- Lets no more jobs into a batch.
-- KEYS batch   ARGV state   -> 1
local function close_batch(K, A)
  local known = redis.call('EXISTS', K[1])
  redis.call('HSETNX', K[1], 'st', A[1])
  if known == 0 then redis.call('PEXPIRE', K[1], BATCH_TTL_MS) end
  return 1
end

-- Answers one entry of the front door, once, and takes it off; a refused one becomes a dead letter.
-- KEYS front reply dead   ARGV entry reply ttl_ms reason body   -> 1 | 0 was answered already
local function answer(K, A)
  redis.call('XACK', K[1], 'sched', A[1])
  if redis.call('XDEL', K[1], A[1]) == 0 then return 0 end
  redis.call('RPUSH', K[2], A[2])
  redis.call('PEXPIRE', K[2], A[3])
  if A[4] ~= '' then
    redis.call('XADD', K[3], 'MAXLEN', '~', MAX_LETTERS, '*',
      'j', '', 'r', A[4], 'q', 'front', 'e', A[1], 'b', string.sub(A[5], 1, MAX_LETTER_BODY))
  end
  return 1
end
