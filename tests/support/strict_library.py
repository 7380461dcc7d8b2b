"""The function library with a guard around every command that its functions send.

The guard raises an error where a function touches a key that its caller did not declare, or where
one refuses with an error after it has written something.
"""

from tidemill.protocol.library import VERSION, library_source

_GUARD = """
local declared, num_writes = {}, 0
-- What the server offers while it loads a library is not what it offers while a function runs.
local function server() return redis end
local READS = {TIME = true, GET = true, HGET = true, HMGET = true, HSTRLEN = true, EXISTS = true,
  XLEN = true, XRANGE = true, ZSCORE = true,
  HEXISTS = true, HGETALL = true, HKEYS = true, ZCARD = true}
local NO_KEY = {TIME = true, SPUBLISH = true}
local redis = {}
function redis.error_reply(message) return server().error_reply(message) end
local function check(name, args)
  if not NO_KEY[name] then
    local first = name == 'XGROUP' and 2 or 1
    while name == 'XREADGROUP' and args[first - 1] ~= 'STREAMS' do first = first + 1 end
    local last = (name == 'DEL' or name == 'EXISTS') and #args or first
    for i = first, last do
      if not declared[args[i]] then error('undeclared key ' .. tostring(args[i])) end
    end
  end
  if not READS[name] then num_writes = num_writes + 1 end
end
function redis.call(name, ...)
  check(name, {...})
  return server().call(name, ...)
end
function redis.pcall(name, ...)
  check(name, {...})
  return server().pcall(name, ...)
end
function redis.register_function(spec)
  local callback = spec.callback
  spec.callback = function(K, A)
    declared, num_writes = {}, 0
    for _, key in ipairs(K) do declared[key] = true end
    local reply = callback(K, A)
    if type(reply) == 'table' and reply.err and num_writes > 0 then
      error('refused after a write: ' .. reply.err)
    end
    return reply
  end
  server().register_function(spec)
end
"""


def strict_source(version: int = VERSION, *, source: str | None = None) -> str:
    """Return a version of the library, or another one in ``source``, with the guard around it."""
    shebang, _, rest = (source or library_source(version)).partition("\n")
    return f"{shebang}{_GUARD}{rest}"
