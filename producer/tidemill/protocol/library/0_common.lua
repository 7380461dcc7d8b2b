-- Tidemill's state changes: each function is one atomic move of one or more jobs.
-- Rules: time comes from TIME alone; every key is in KEYS; every function may be called again with
-- the same arguments (a lost reply is answered by a second call); at most 256 items a call; a
-- function that refuses has written nothing.
--
-- The parts are joined in the order of their file names and registered under the version's name,
-- so that two versions can serve the same keys during an upgrade (docs/redis-keys.md).
--
-- Key types: job = hash, in = stream (group "sched"), act/run/dly/due/wk/mds/ended/lib = sorted
-- set, out = stream, cmd = stream, idem = string, kv = string, cnt/salt/wi/md/cfg/thr/batch/rl = hash,
-- members = set, sch/sche/tok = string, dead/back/front/ev = stream, reply = list, wh/whd/whb = hash,
-- whq/whl/whr = sorted set.
-- Job fields: st state, tn tenant, md model, pr priority, qn queue, f fence, n tokens emitted,
-- at attempts, cl fence of the last attempt that its worker read, cn n at the dispatch, cr crashes
-- since the last new token, w worker, req request, h routing key, g how many hashes of it stand for
-- a prefix id, cost prompt tokens, mt bound on output tokens, tk tokens counted against quotas, eid pointer's entry id, ik idempotency key, salt, res result, err last
-- error, bid batch, par parent, wh callback URL, meta metadata (JSON), dl/qdl deadline of the job / of its first dispatch (ms, 0 none),
-- sm stall timeout (ms, 0 none), mx/rt retries allowed / used, tp last token (ms),
-- ts/td/tf/te submitted, dispatched, first token, ended (ms).

local SEAL = '9007199254740991'
local TERMINAL = {done = true, failed = true, cancelled = true, expired = true, dead = true}
local MAX_LETTERS = 10000
local MAX_COMMANDS = 10000
local MAX_STATUSES = 1000
local MAX_SETTING = 1e15
local MIN_WEIGHT = 0.1
local MAX_WEIGHT = 100
local LIBRARY_TTL_MS = 86400000
local ANNOUNCE_EVERY_MS = 60000

local function now()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function number(value)
  return tonumber(value or 0) or 0
end

-- A setting, if it is a whole number from 0; anything else counts as not set.
local function setting(value)
  local n = tonumber(value or nil)
  return n and n >= 0 and n <= MAX_SETTING and math.floor(n) == n and n or nil
end

-- A tenant's weight, if it is one.
local function weight(value)
  local n = tonumber(value or nil)
  return n and n >= MIN_WEIGHT and n <= MAX_WEIGHT and n or nil
end

local function count(cnt, field, by)
  if by == 0 then return end
  local total = redis.pcall('HINCRBY', cnt, field, by)
  -- What is no number any more starts again: an end must not fail in the midst of its writes.
  if total == 0 or type(total) == 'table' then redis.call('HDEL', cnt, field) end
end

-- Counts a job in (1) or out (-1) of its tenant's queue.
local function count_queued(cnt, tenant, tokens, by)
  count(cnt, 'q:' .. tenant, by)
  count(cnt, 'qt:' .. tenant, by * number(tokens))
end

-- Whether a job is a line of a batch object, which is told and listed in place of its lines.
local function is_batch_line(batch, idem_key)
  if not batch or batch == '' or not idem_key then return false end
  return string.sub(idem_key, 1, #batch + 1) == batch .. ':'
end

-- The pairs whose value is not '' or 0: most jobs lack most of them, and each takes some 40 bytes.
local function without_defaults(...)
  local fields, kept = {...}, {}
  for i = 1, #fields, 2 do
    if fields[i + 1] ~= '' and fields[i + 1] ~= 0 then
      kept[#kept + 1] = fields[i]
      kept[#kept + 1] = fields[i + 1]
    end
  end
  return kept
end

-- Says that this version of the library is in use; the leader drops those that nobody uses.
local function announce(lib, t)
  local known = redis.call('ZSCORE', lib, 'tmN')
  if known and tonumber(known) > t + LIBRARY_TTL_MS - ANNOUNCE_EVERY_MS then return end
  redis.call('ZADD', lib, 'GT', t + LIBRARY_TTL_MS, 'tmN')
end

local function load_job(job)
  local v = redis.call('HMGET', job, 'st', 'n', 'f', 'w', 'tn', 'tk', 'bid', 'eid', 'at', 'cn',
    'cl', 'mx', 'rt', 'dl', 'qdl', 'sm', 'td', 'tp', 'ik', 'wh', 'meta')
  if v[1] and not tonumber(v[2] or nil) then v[2] = '0' end
  return {st = v[1], n = v[2], f = v[3], w = v[4], tn = v[5] or v[1] and 'default', tk = v[6], bid = v[7], eid = v[8],
    at = v[9], cn = v[10], cl = v[11], mx = number(v[12]), rt = number(v[13]), dl = number(v[14]),
    qdl = number(v[15]), sm = number(v[16]), td = number(v[17]), tp = number(v[18]), ik = v[19],
    wh = v[20] or '', meta = v[21] or ''}
end

-- Adds the pointer of a job to its ingress stream and returns the entry's id; v = {routing key,
-- prompt tokens, model, attempts, priority, bound on output tokens, deadline, hashes of a prefix id,
-- outputs if more than one}.
local function add_pointer(input, act, id, queue, bell, t, v)
  local function add()
    return redis.call('XADD', input, 'NOMKSTREAM', '*',
      'j', id, 'h', v[1], 'c', v[2], 'm', v[3], 'a', v[4], 'p', v[5],
      'o', number(v[6]), 'd', number(v[7]), 'g', number(v[8]), 's', number(v[9]))
  end
  local entry = add()
  if not entry then
    redis.call('XGROUP', 'CREATE', input, 'sched', '0', 'MKSTREAM')
    entry = add()
  end
  redis.call('ZADD', act, 'NX', t, queue)
  redis.call('SPUBLISH', bell, queue)
  return entry
end

-- Puts a job that can run again on its ingress stream.
local function point(input, act, job, id, queue, bell)
  local v = redis.call('HMGET', job, 'h', 'cost', 'md', 'at', 'pr', 'mt', 'dl', 'g', 'ns')
  local entry = add_pointer(input, act, id, queue, bell, now(), v)
  redis.call('HSET', job, 'st', 'queued', 'eid', entry)
end

local function command(cmd, kind, id, fence, ttl)
  local entry = redis.call('XADD', cmd, 'MAXLEN', '~', MAX_COMMANDS, '*',
    'k', kind, 'j', id, 'f', fence)
  redis.call('PEXPIRE', cmd, ttl)
  return entry
end

-- When a job must be looked at again, 0 if never: the earliest of its time limits.
local function next_due(v)
  local due = v.dl
  local function earlier(t)
    if t ~= 0 and (due == 0 or t < due) then due = t end
  end
  if v.st ~= 'run' and number(v.f) == 0 then earlier(v.qdl) end
  if v.st == 'run' and v.sm ~= 0 then earlier(math.max(v.td, v.tp) + v.sm) end
  return due
end

-- Puts an entry into the outbox of webhooks, if the work has an address of its own (url) or its
-- tenant, whose endpoints are in hooks, has some that are on.
local function put_event(ev, hooks, url, fields)
  if url ~= '' then
    fields[#fields + 1] = 'u'
    fields[#fields + 1] = url
  elseif number(redis.call('HGET', hooks, 'on')) == 0 then return end
  redis.call('XADD', ev, '*', unpack(fields))
end
