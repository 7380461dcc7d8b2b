"""The bounded look at the keys of a shard, a page at a time, so that nobody has to wait for it.

Jobs move while they are looked at, and no two reads are one instant.  So whatever looks wrong is
read as *job, index, job again*: fence and entry id change with every move, so two equal readings
of the job mean that it did not move in between.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import redis

from tidemill.protocol.keys import ShardKeys, is_permanent
from tidemill.protocol.states import TERMINAL_STATES, JobState
from tidemill.service.diagnosis.keyspace import Census
from tidemill.service.diagnosis.replies import Command, ask, read

T = TypeVar("T")

DEFAULT_MAX_KEYS = 100_000
_PAGE = 500
_NO_TTL = -1
_ACTIVE = {state.value.encode() for state in JobState if state not in TERMINAL_STATES}
_QUEUED, _RUNNING, _DELAYED = (
    state.value.encode() for state in (JobState.QUEUED, JobState.RUNNING, JobState.DELAYED)
)


def take_census(client: redis.Redis, keys: ShardKeys, max_keys: int) -> Census | None:
    """Look at up to ``max_keys`` keys, leases and pointers each; None if SCAN is forbidden."""
    (num_keys,) = ask(client, [("DBSIZE",)])
    census = Census(int(num_keys or 0))
    cursor = 0
    while not census.complete and census.num_examined < max_keys:
        step = min(_PAGE, max_keys - census.num_examined)
        (page,) = ask(client, [("SCAN", cursor, "MATCH", f"{keys.prefix}*", "COUNT", step)])
        if page is None:
            return None
        cursor, names = page
        census.num_examined += step
        census.complete = cursor == 0
        _Page(client, keys, census).examine([bytes(name) for name in names])
    census.num_examined = min(census.num_examined, census.num_keys)
    census.stale_leases = _stale(client, keys, keys.running, {_RUNNING}, max_keys)
    census.stale_times = _stale(client, keys, keys.delayed, {_DELAYED}, max_keys)
    census.stale_times += _stale(client, keys, keys.due, _ACTIVE, max_keys)
    _check_pointers(client, keys, census, max_keys)
    return census


@dataclass(slots=True)
class _Page:
    client: redis.Redis
    keys: ShardKeys
    census: Census
    jobs: list[str] = field(default_factory=list)
    owned: list[tuple[bytes, str]] = field(default_factory=list)
    others: list[bytes] = field(default_factory=list)
    idempotency: list[bytes] = field(default_factory=list)
    queues: list[str] = field(default_factory=list)
    batches: list[tuple[bytes, str]] = field(default_factory=list)

    def examine(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._sort_in(name)
        self._check_jobs()
        self._check_queues()
        self._find_owners()
        self._check_owned()
        self._check_batches()
        for name, (ttl,) in _ask_each(self.client, self.others, lambda key: [("PTTL", key)]):
            if ttl == _NO_TTL:
                self.census.leaks.add(_text(name))

    def _sort_in(self, name: bytes) -> None:
        rest = _text(name).removeprefix(self.keys.prefix)
        kind, _, tail = rest.partition(":")
        if kind == "j":
            self.jobs.append(tail)
        elif kind == "o":
            self.owned.append((name, tail))
        elif kind == "idem":
            self.idempotency.append(name)
        elif kind == "in":
            self.queues.append(tail)
        elif kind == "b":
            self.batches.append((name, f"{self.keys.prefix}bj:{tail}"))
        elif not is_permanent(name):
            self.others.append(name)

    def _check_jobs(self) -> None:
        # The state before the TTL: a job gets its TTL in the same step in which it ends.
        found = _ask_each(
            self.client,
            self.jobs,
            lambda job: [self._read_job(job), ("PTTL", self.keys.job(job))],
        )
        active = []
        for job_id, (fields, ttl) in found:
            if fields is None or fields[0] not in _ACTIVE:
                if ttl == _NO_TTL:
                    self.census.leaks.add(self.keys.job(job_id))
            else:
                active.append((job_id, fields))
        for (job_id, before), (index, after) in _ask_each(
            self.client, active, lambda job: [self._index_of(*job), self._read_job(job[0])]
        ):
            if not index and index != 0 and before == after:
                self.census.lost_jobs.append(job_id)

    def _read_job(self, job_id: str) -> Command:
        return ("HMGET", self.keys.job(job_id), "st", "f", "eid", "qn")

    def _index_of(self, job_id: str, fields: Sequence[bytes | None]) -> Command:
        state, _, entry_id, queue = fields
        if state == _RUNNING:
            return ("ZSCORE", self.keys.running, job_id)
        if state == _DELAYED:
            return ("ZSCORE", self.keys.delayed, job_id)
        entry = entry_id or b"0-0"
        return ("XRANGE", self.keys.ingress(_text(queue or b"")), entry, entry)

    def _check_queues(self) -> None:
        listed: Command = ("ZSCORE", self.keys.active_queues)
        for queue, (before, length, after) in _ask_each(
            self.client,
            self.queues,
            lambda name: [(*listed, name), ("XLEN", self.keys.ingress(name)), (*listed, name)],
        ):
            if before is None and after is None and length:
                self.census.unlisted_queues.append(queue)

    def _find_owners(self) -> None:
        for name, (value,) in _ask_each(self.client, self.idempotency, lambda key: [("GET", key)]):
            if value is not None:
                self.owned.append((name, _text(value).rpartition(" ")[2]))

    def _check_owned(self) -> None:
        # Token logs and idempotency keys live without a TTL exactly as long as their job is open.
        for (name, _), (state, ttl) in _ask_each(
            self.client,
            self.owned,
            lambda item: [("HGET", self.keys.job(item[1]), "st"), ("PTTL", item[0])],
        ):
            if ttl == _NO_TTL and state not in _ACTIVE:
                self.census.leaks.add(_text(name))

    def _check_batches(self) -> None:
        # A batch lives without a TTL exactly as long as it has jobs that have not ended.
        for (name, _), (before, members, after) in _ask_each(
            self.client,
            self.batches,
            lambda item: [("PTTL", item[0]), ("EXISTS", item[1]), ("PTTL", item[0])],
        ):
            if before == after == _NO_TTL and not members:
                self.census.leaks.add(_text(name))


def _stale(
    client: redis.Redis, keys: ShardKeys, index: str, states: set[bytes], limit: int
) -> list[str]:
    """Return the jobs of a sorted set that are in none of the states that belong there."""
    stale = []
    for start in range(0, limit, _PAGE):
        stop = min(start + _PAGE, limit) - 1
        (flat,) = read(client, [("ZRANGE", index, start, stop, "WITHSCORES")])
        members = [(bytes(j), float(s)) for j, s in zip(flat[::2], flat[1::2], strict=True)]
        found = _ask_each(
            client,
            members,
            lambda item: [("HGET", keys.job(_text(item[0])), "st"), ("ZSCORE", index, item[0])],
        )
        stale += [
            _text(job_id)
            for (job_id, score), (state, after) in found
            if state not in states and after == score
        ]
        if len(members) < _PAGE:
            break
    return stale


def _check_pointers(client: redis.Redis, keys: ShardKeys, census: Census, limit: int) -> None:
    (names,) = read(client, [("ZRANGE", keys.active_queues, 0, -1)])
    left = limit
    for queue in map(_text, names):
        for entries in _pointer_pages(client, keys.ingress(queue), left):
            left -= len(entries)
            census.stale_pointers += _stale_among(client, keys, queue, entries)


def _pointer_pages(client: redis.Redis, stream: str, limit: int) -> Iterator[list[Any]]:
    start = "-"
    while limit > 0:
        (entries,) = read(client, [("XRANGE", stream, start, "+", "COUNT", min(_PAGE, limit))])
        if not entries:
            return
        yield entries
        limit -= len(entries)
        start = f"({_text(entries[-1][0])}"


def _stale_among(
    client: redis.Redis, keys: ShardKeys, queue: str, entries: Sequence[Any]
) -> list[str]:
    stream = keys.ingress(queue)
    pointers = [(entry_id, _text(fields.get(b"j", b""))) for entry_id, fields in entries]
    found = _ask_each(
        client,
        pointers,
        lambda item: [
            ("HMGET", keys.job(item[1]), "st", "eid"),
            ("XRANGE", stream, item[0], item[0]),
        ],
    )
    return [
        f"{queue} {_text(entry_id)}"
        for (entry_id, _), (job, still_there) in found
        if job != [_QUEUED, entry_id] and still_there
    ]


def _ask_each(
    client: redis.Redis, items: Sequence[T], commands: Callable[[T], list[Command]]
) -> Iterator[tuple[T, list[Any]]]:
    """Yield each item with the replies to its commands, all of them sent in one round trip."""
    each = [commands(item) for item in items]
    replies = iter(ask(client, [command for some in each for command in some]))
    for item, some in zip(items, each, strict=True):
        yield item, [next(replies) for _ in some]


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
