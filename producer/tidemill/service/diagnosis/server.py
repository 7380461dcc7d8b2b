"""Is the server one that keeps what it accepted?"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis

from tidemill.protocol.functions import LIBRARY, LUA_SOURCE
from tidemill.service.broker import Durability, durability_of
from tidemill.service.broker_binary import MIN_VERSION
from tidemill.service.diagnosis.finding import Finding, failure, ok, warning
from tidemill.service.diagnosis.replies import ask, read
from tidemill.service.redis import compatible_version, server_info

_MEMORY_WARNING, _MEMORY_FAILURE = 0.80, 0.95
#: A follower that reads nothing for a moment must not be cut off at once.
_MIN_PUBSUB_BYTES = 1024 * 1024

_SYNC_FIX = "Run: redis-cli CONFIG SET appendfsync always, if its disk syncs within 10 ms."
_LOAD_FIX = "Load it as the deploy user, see docs/operations.md; `tidemill up` does it by itself."


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says about itself; None stands for what this user may not ask.

    ``libraries`` maps names to code; ``clock_difference_ms`` is this machine's clock minus the
    server's.
    """

    info: Mapping[str, Any]
    config: Mapping[str, str] | None
    libraries: Mapping[str, str] | None
    clock_difference_ms: float


def read_server(client: redis.Redis) -> ServerFacts:
    """Ask the server; raises ``BrokerUnavailable``, or ``BrokerError`` if INFO is refused."""
    read(client, [("PING",)])  # so that connecting does not count as clock difference
    before = time.time()
    (now,) = read(client, [("TIME",)])
    middle = (before + time.time()) / 2
    (info,) = read(client, [("INFO", "everything")])
    settings = ("appendonly", "appendfsync", "client-output-buffer-limit")
    config, libraries = ask(
        client,
        [
            ("CONFIG GET", *settings),
            ("FUNCTION LIST", "LIBRARYNAME", "tm*", "WITHCODE"),
        ],
    )
    return ServerFacts(
        info=info,
        config=config,
        libraries=None if libraries is None else dict(map(_name_and_code, libraries)),
        clock_difference_ms=1000 * (middle - now[0]) - now[1] / 1000,
    )


def check_server_facts(facts: ServerFacts) -> list[Finding]:
    """Judge the server alone, whatever is on its queues."""
    return [
        _version(facts),
        _eviction(facts),
        _memory(facts),
        _durability(facts),
        _functions(facts),
        _output_buffer(facts),
        ok("clock", f"this machine is {facts.clock_difference_ms:+.0f} ms from the server"),
    ]


def _name_and_code(reply: list[Any]) -> tuple[str, str]:
    fields = dict(zip(reply[::2], reply[1::2], strict=True))
    return fields[b"library_name"].decode(), fields[b"library_code"].decode("utf-8", "replace")


def _version(facts: ServerFacts) -> Finding:
    server = server_info(dict(facts.info))
    found = f"{server.name} {'.'.join(map(str, server.version))}"
    if compatible_version(dict(facts.info)) < MIN_VERSION:
        return failure("server", found, "Upgrade to Redis >= 7.0 or Valkey >= 7.2.")
    if facts.info.get("role", "master") != "master":
        return failure("server", f"{found}, a replica", "Point TIDEMILL_REDIS_URL at the primary.")
    return ok("server", found)


def _eviction(facts: ServerFacts) -> Finding:
    policy = str(facts.info.get("maxmemory_policy", "noeviction"))
    fix = "Run: redis-cli CONFIG SET maxmemory-policy noeviction."
    if policy == "noeviction":
        return ok("eviction", policy)
    if not int(facts.info.get("maxmemory", 0)):
        return warning("eviction", f"{policy}, without effect until maxmemory is set", fix)
    return failure("eviction", f"{policy}: a full server forgets accepted jobs", fix)


def _memory(facts: ServerFacts) -> Finding:
    used, limit = (int(facts.info.get(name, 0)) for name in ("used_memory", "maxmemory"))
    if not limit:
        return warning(
            "memory",
            f"{_mib(used)} used, no limit: the system may kill the server when memory is short",
            "Set maxmemory to at most half of the machine's memory.",
        )
    finding = f"{_mib(used)} of {_mib(limit)} used ({used / limit:.0%})"
    fix = "Raise maxmemory, drain the queues or lower the queue bounds; at the limit submits stop."
    if used >= _MEMORY_FAILURE * limit:
        return failure("memory", finding, fix)
    return (
        warning("memory", finding, fix)
        if used >= _MEMORY_WARNING * limit
        else ok("memory", finding)
    )


def _durability(facts: ServerFacts) -> Finding:
    if facts.info.get("aof_last_write_status", "ok") != "ok":
        return failure(
            "durability",
            "the last write to the append-only file failed",
            "Free disk space where the server keeps its data; its log has the reason.",
        )
    level = _level(facts)
    if level == "fast" and (facts.config or {}).get("appendfsync") == "no":
        return _lazy()
    say = {"fsync": _fsync, "fast": _fast, "none": _not_durable, "unknown": _unknown}
    return say[level]()


def _level(facts: ServerFacts) -> Durability:
    if not int(facts.info.get("aof_enabled", 0)):
        return "none"
    return "unknown" if facts.config is None else durability_of(facts.config)


def _fsync() -> Finding:
    return ok("durability", "fsync: an accepted job survives power loss")


def _fast() -> Finding:
    return warning(
        "durability", "fast: a crash may lose the last two seconds of accepted jobs", _SYNC_FIX
    )


def _lazy() -> Finding:
    return warning(
        "durability",
        "the system decides when to sync: a crash may lose half a minute of accepted jobs",
        _SYNC_FIX,
    )


def _not_durable() -> Finding:
    return failure(
        "durability",
        "none: a restart loses every job",
        "Run: redis-cli CONFIG SET appendonly yes, and put it into the configuration file.",
    )


def _unknown() -> Finding:
    return warning(
        "durability",
        "the append-only file is on; how often it is synced is hidden from this user",
        "Check that appendfsync is always, or run doctor as a user with +config|get.",
    )


def _functions(facts: ServerFacts) -> Finding:
    if facts.libraries is None:
        return warning(
            "functions", "hidden from this user", "Run doctor as a user with +function|list."
        )
    code = facts.libraries.get(LIBRARY)
    others = sorted(facts.libraries.keys() - {LIBRARY})
    beside = f"; beside it {', '.join(others)}" if others else ""
    if code is None:
        return failure("functions", f"library {LIBRARY} is not loaded{beside}", _LOAD_FIX)
    if code != LUA_SOURCE:
        return failure("functions", f"library {LIBRARY} differs from this version's", _LOAD_FIX)
    return ok("functions", f"library {LIBRARY} is loaded and current{beside}")


def _output_buffer(facts: ServerFacts) -> Finding:
    check = "pub/sub buffer"
    if facts.config is None:
        return ok(check, "hidden from this user")
    words = str(facts.config.get("client-output-buffer-limit", "")).split()
    if "pubsub" not in words:
        return ok(check, "the server does not tell its limit")
    hard = int(words[words.index("pubsub") + 1])
    fix = "Run: redis-cli CONFIG SET client-output-buffer-limit 'pubsub 32mb 8mb 60'."
    if not hard:
        return warning(check, "no limit: a reader that is too slow fills the memory", fix)
    if hard < _MIN_PUBSUB_BYTES:
        return warning(check, f"{hard} bytes: readers are cut off at once and read again", fix)
    return ok(check, f"a reader is cut off at {_mib(hard)} and goes on where it was")


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
