-- Takes requests and tokens from what an API key may submit in a minute; tokens < 0 come back.
-- KEYS bucket   ARGV requests and tokens per minute ('' no bound), requests, tokens
-- -> {0 taken | how many ms to wait, 'rpm' | 'tpm' | '' what lacks, requests left, tokens left}, of
--    what has no bound -1
local function charge_key(K, A)
  local limits = {rpm = tonumber(A[1]), tpm = tonumber(A[2])}
  local refusal, rest = take_rate(K[1], limits, number(A[3]), number(A[4]), now())
  local which, wait = string.match(refusal or '', '^RATELIMITED (%S+) %S+ (%d+)$')
  return {number(wait), which or '', math.floor(rest.r or -1), math.floor(rest.t or -1)}
end

-- Keeps when a key was used, if it is still there.
-- KEYS keys uses   ARGV key   -> 1 | 0 there is no such key
local function use_key(K, A)
  if redis.call('HEXISTS', K[1], A[1]) == 0 then return 0 end
  redis.call('HSET', K[2], A[1], now())
  return 1
end
