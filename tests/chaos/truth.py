"""What the broker holds at the end of a run, written down for the checker."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import redis

from chaos.plan import TENANTS
from support.valkey import leaked_keys
from tidemill.protocol.keys import ShardKeys

#: Counters of what is kept, not of what is unfinished: bytes of stored results.
LASTING_COUNTERS = frozenset({"rb"})

_BATCH = 500


@dataclass
class Truth:
    """A dump of the shard: job id -> hash, job id -> token log, and what should be empty."""

    jobs: dict[str, dict[str, bytes]] = field(default_factory=dict)
    logs: dict[str, list[tuple[str, dict[str, bytes]]]] = field(default_factory=dict)
    counters: dict[str, str] = field(default_factory=dict)
    indexes: dict[str, int] = field(default_factory=dict)
    leaked: list[str] = field(default_factory=list)
    #: "<tenant>:<batch>" -> its figures.
    batches: dict[str, dict[str, int]] = field(default_factory=dict)
    #: Bytes kept by ended jobs, as their index has it.
    kept_bytes: int = 0
    #: (tenant, entry) of the back doors.
    back_doors: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    dead_letters: list[dict[str, str]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the dump to a file."""
        path.write_bytes(msgpack.packb(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "Truth":
        """Read a dump back."""
        fields = msgpack.unpackb(path.read_bytes(), raw=False, strict_map_key=False)
        fields["logs"] = {
            job_id: [(entry_id, values) for entry_id, values in log]
            for job_id, log in fields["logs"].items()
        }
        fields["back_doors"] = [(tenant, entry) for tenant, entry in fields["back_doors"]]
        return cls(**fields)


def is_idle(client: redis.Redis) -> bool:
    """Whether nothing waits and nothing runs."""
    keys = ShardKeys()
    with client.pipeline(transaction=False) as pipe:
        for key in index_keys(keys).values():
            pipe.zcard(key)
        pipe.hkeys(keys.counters)
        *sizes, counters = pipe.execute()
    return not any(sizes) and {name.decode() for name in counters} <= LASTING_COUNTERS


def index_keys(keys: ShardKeys) -> dict[str, str]:
    """The sorted sets that hold unfinished jobs, by their short names."""
    return {name: keys.prefix + name for name in ("run", "act", "dly", "due")}


def dump(client: redis.Redis) -> Truth:
    """Read everything that the checker judges."""
    keys, truth = ShardKeys(), Truth()
    prefix = keys.job("")
    job_ids = [key.decode()[len(prefix) :] for key in client.scan_iter(f"{prefix}*", count=1000)]
    for batch in _batches(job_ids):
        _dump_jobs(client, keys, batch, truth)
    truth.counters = _text(client.hgetall(keys.counters))
    truth.indexes = {name: client.zcard(key) for name, key in index_keys(keys).items()}
    truth.indexes["in"] = len(list(client.scan_iter(keys.ingress("*"), count=1000)))
    truth.batches = _dump_batches(client, keys)
    truth.indexes["bj"] = len(list(client.scan_iter(keys.prefix + "bj:*", count=1000)))
    members = client.zrange(keys.ended, 0, -1)
    truth.kept_bytes = sum(int(member.partition(b" ")[0]) for member in members)
    truth.leaked = leaked_keys(client)
    truth.back_doors = [
        (tenant, _text(fields))
        for tenant in TENANTS
        for _, fields in client.xrange(keys.back_door(tenant))
    ]
    truth.dead_letters = [_text(fields) for _, fields in client.xrange(keys.dead_letters)]
    return truth


def _dump_jobs(client: redis.Redis, keys: ShardKeys, job_ids: Sequence[str], truth: Truth) -> None:
    with client.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hgetall(keys.job(job_id))
            pipe.xrange(keys.token_log(job_id))
        replies = iter(pipe.execute())
    for job_id in job_ids:
        truth.jobs[job_id] = _named(next(replies))
        truth.logs[job_id] = [(entry.decode(), _named(fields)) for entry, fields in next(replies)]


def _dump_batches(client: redis.Redis, keys: ShardKeys) -> dict[str, dict[str, int]]:
    prefix = keys.prefix + "b:"
    names = [key.decode() for key in client.scan_iter(prefix + "*", count=1000)]
    hashes = {name[len(prefix) :]: _text(client.hgetall(name)) for name in names}
    return {
        name: {field: int(value) for field, value in fields.items() if value.isdecimal()}
        for name, fields in hashes.items()
    }


def _named(fields: dict[bytes, bytes]) -> dict[str, bytes]:
    return {name.decode(): value for name, value in fields.items()}


def _text(fields: dict[Any, Any]) -> dict[str, str]:
    return {k.decode(): v.decode("utf-8", "replace") for k, v in fields.items()}


def _batches(items: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(items), _BATCH):
        yield items[start : start + _BATCH]


def short(items: Iterable[Any], limit: int = 5) -> str:
    """A list that may be long, in a few words."""
    listed = list(items)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(map(str, listed[:limit])) + more
