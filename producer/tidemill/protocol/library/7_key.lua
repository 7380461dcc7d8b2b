-- Takes one request from what an API key may submit in a minute.
-- KEYS bucket   ARGV requests per minute   -> 0 taken | how many ms to wait for it
local function charge_key(K, A)
  local refusal = take_rate(K[1], {rpm = number(A[1])}, 0, now())
  return refusal and tonumber(string.match(refusal, '(%d+)$')) or 0
end

-- Keeps when a key was used, if it is still there.
-- KEYS keys uses   ARGV key   -> 1 | 0 there is no such key
local function use_key(K, A)
  if redis.call('HEXISTS', K[1], A[1]) == 0 then return 0 end
  redis.call('HSET', K[2], A[1], now())
  return 1
end
