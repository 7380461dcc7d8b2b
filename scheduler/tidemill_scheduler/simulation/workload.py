"""Streams of jobs made of one table of columns, so that ten million jobs need no memory of theirs.

A table holds each distinct job once: its chain of hash ids, its lengths and its arrival.  Copies,
shuffles and compressed arrivals are views of it, and jobs exist only while they are iterated.
"""

import math
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import repeat
from struct import Struct
from typing import NamedTuple

from tidemill.protocol.errors import ConfigError

#: Odd, so that multiplication permutes the 64-bit numbers; near 2**64 divided by the golden ratio,
#: so that neighbouring ids come to lie far apart, as hashes do.
_SPREAD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

#: Bounds on how many times as fast the jobs of a workload may come.
MIN_LOAD = 0.001
MAX_LOAD = 1e6


class SimJob(NamedTuple):
    """One job of a workload; times are seconds of the simulation, lengths are tokens.

    ``output_tokens`` is what it will produce, which no policy may know; ``max_tokens`` is the bound
    its submitter set, 0 for none.
    """

    arrival: float
    key: bytes
    input_tokens: int
    output_tokens: int
    tenant: str = "default"
    priority: int = 0
    max_tokens: int = 0
    deadline: float = math.inf


class Bound(NamedTuple):
    """What one cache without end would save on a workload, in prompt tokens."""

    input_tokens: int
    hit_tokens: int

    @property
    def share(self) -> float:
        """The hit tokens as a share of the prompt tokens."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


@dataclass(slots=True)
class Table:
    """Columns of distinct jobs, in order of arrival.

    Row ``i`` has the hash ids ``chain[starts[i]:starts[i + 1]]``, one for each *full* run of
    ``tokens_per_hash`` tokens; equal ids stand for equal prefixes.
    """

    starts: "array[int]" = field(default_factory=lambda: array("Q", [0]))
    chain: "array[int]" = field(default_factory=lambda: array("I"))
    inputs: "array[int]" = field(default_factory=lambda: array("I"))
    outputs: "array[int]" = field(default_factory=lambda: array("I"))
    arrivals: "array[float]" = field(default_factory=lambda: array("d"))
    tenants: "array[int]" = field(default_factory=lambda: array("H"))
    tenant_names: list[str] = field(default_factory=lambda: ["default"])
    #: One more than the largest hash id.
    num_ids: int = 0

    def __len__(self) -> int:
        return len(self.inputs)

    def append(
        self, ids: list[int], lengths: tuple[int, int], arrival: float = 0.0, tenant: int = 0
    ) -> None:
        """Add a job with these hash ids, (input, output) tokens and arrival in seconds."""
        self.chain.extend(ids)
        self.starts.append(len(self.chain))
        self.inputs.append(lengths[0])
        self.outputs.append(max(1, lengths[1]))
        self.arrivals.append(arrival)
        self.tenants.append(tenant)
        self.num_ids = max(self.num_ids, max(ids, default=-1) + 1)

    def in_order(self) -> "Table":
        """Return the jobs sorted by arrival, the first one at 0; those of one time stay in turn."""
        order = sorted(range(len(self)), key=self.arrivals.__getitem__)
        start = self.arrivals[order[0]] if order else 0.0
        table = Table(tenant_names=self.tenant_names)
        for row in order:
            ids = self.chain[self.starts[row] : self.starts[row + 1]].tolist()
            lengths = (self.inputs[row], self.outputs[row])
            table.append(ids, lengths, self.arrivals[row] - start, self.tenants[row])
        return table


@dataclass(frozen=True, slots=True)
class Workload:
    """An immutable view of a table; every method that changes something returns another view.

    A bulk workload waits as a whole when the simulation begins, an online one arrives over time.
    """

    name: str
    table: Table
    tokens_per_hash: int
    is_bulk: bool = False
    priority: int = 0
    max_tokens: int = 0
    #: Seconds from a job's arrival to its deadline.
    deadline_seconds: float = math.inf
    load: float = 1.0
    num_copies: int = 1
    #: Leading hashes of each chain that all copies share.
    common_depth: int = 0
    limit: int = 0
    salt: int = 0
    order: "array[int] | None" = None

    @property
    def num_jobs(self) -> int:
        """How many jobs it yields."""
        everything = len(self.table) * self.num_copies
        return min(self.limit, everything) if self.limit else everything

    def as_bulk(self, priority: int = 1) -> "Workload":
        """Let all jobs wait from the start."""
        return replace(self, is_bulk=True, priority=priority)

    def with_priority(self, priority: int) -> "Workload":
        """Give all jobs this priority; lower is sooner."""
        return replace(self, priority=priority)

    def with_deadline(self, seconds: float) -> "Workload":
        """Give each job a deadline so many seconds after its arrival."""
        return replace(self, deadline_seconds=seconds)

    def named(self, name: str) -> "Workload":
        """Give it another name in reports."""
        return replace(self, name=name)

    def salted(self, salt: str) -> "Workload":
        """Make its prefixes differ from those of the same table under any other salt."""
        digest = blake2b(salt.encode(), digest_size=8).digest()
        return replace(self, salt=int.from_bytes(digest, "big"))

    def compressed(self, load: float) -> "Workload":
        """Let the jobs arrive ``load`` times as fast."""
        if not MIN_LOAD <= load <= MAX_LOAD:
            raise ConfigError(
                f"load: {load:g} is not from {MIN_LOAD:g} to {MAX_LOAD:,.0f}",
                fix="Give a factor such as 2.5.",
            )
        return replace(self, load=self.load * load)

    def copies(self, number: int, common_depth: int = 0) -> "Workload":
        """Repeat each job ``number`` times, each time with prefixes of its own.

        All copies of a chain share its first ``common_depth`` hashes.  Raises ``ConfigError`` on a
        workload that was shuffled before, because its order would be lost.
        """
        if self.order is not None:
            raise ConfigError("copies: shuffled already", fix="Copy first and shuffle afterwards.")
        if number < 1 or number * self.table.num_ids >= 1 << 62:
            raise ConfigError(f"copies: {number} is not possible", fix="Give 1 or more.")
        return replace(self, num_copies=number, common_depth=common_depth)

    def shuffled(self, seed: int, *, window: int = 0) -> "Workload":
        """Let the jobs come in random order; arrivals of an online workload stay as they are.

        With a ``window`` the copies come one after the other, and only so many jobs are mixed at a
        time, as where those who submit more than can wait send related jobs together.
        """
        num_rows, num_copies = len(self.table), self.num_copies
        order = array("I", range(num_rows * num_copies))
        rng = random.Random(seed)
        if not window:
            rng.shuffle(order)
            return replace(self, order=order)
        for copy in range(num_copies):
            rows = range(copy, num_rows * num_copies, num_copies)
            order[copy * num_rows : (copy + 1) * num_rows] = array("I", rows)
        for start in range(0, len(order), window):
            part = order[start : start + window]
            rng.shuffle(part)
            order[start : start + window] = part
        return replace(self, order=order)

    def first(self, number: int) -> "Workload":
        """Keep the first jobs, as they would arrive."""
        return replace(self, limit=number)

    def __iter__(self) -> Iterator[SimJob]:
        table, num_copies = self.table, self.num_copies
        scale = 0.0 if self.is_bulk else 1.0 / self.load
        names, tenants = table.tenant_names, table.tenants
        inputs, outputs, arrivals = table.inputs, table.outputs, table.arrivals
        order = self.order if self.order is not None else range(self.num_jobs)
        for place, index in zip(range(self.num_jobs), order, strict=False):
            row, copy = divmod(index, num_copies)
            arrival = arrivals[place // num_copies] * scale
            yield SimJob(
                arrival,
                self._key(row, copy),
                inputs[row],
                outputs[row],
                names[tenants[row]],
                self.priority,
                self.max_tokens,
                arrival + self.deadline_seconds,
            )

    def bound(self) -> Bound:
        """Return what one endless cache would save, computed from the hash ids alone.

        At least one token of a prompt is always computed.
        """
        if self.num_jobs < len(self.table) * self.num_copies:
            return self._bound_of_part()
        lengths = list(zip(self.table.inputs, self._known_depths(), repeat(0), strict=False))
        total = hits = 0
        for row, (length, known, _) in enumerate(lengths):
            depth = self.table.starts[row + 1] - self.table.starts[row]
            again = max(known, min(self.common_depth, depth))
            hits += min(length - 1, known * self.tokens_per_hash)
            hits += (self.num_copies - 1) * min(length - 1, again * self.tokens_per_hash)
            total += length * self.num_copies
        return Bound(total, hits)

    def _known_depths(self) -> Iterator[int]:
        table, seen = self.table, set[int]()
        for row in range(len(table)):
            ids = table.chain[table.starts[row] : table.starts[row + 1]]
            yield next((depth for depth, i in enumerate(ids) if i not in seen), len(ids))
            seen.update(ids)

    def _bound_of_part(self) -> Bound:
        seen, total, hits = set[bytes](), 0, 0
        for job in self:
            digests = [job.key[start : start + 8] for start in range(0, len(job.key), 8)]
            known = next((d for d, digest in enumerate(digests) if digest not in seen), None)
            depth = len(digests) if known is None else known
            seen.update(digests)
            total += job.input_tokens
            hits += min(job.input_tokens - 1, depth * self.tokens_per_hash)
        return Bound(total, hits)

    def _key(self, row: int, copy: int) -> bytes:
        table, salt = self.table, self.salt
        ids = table.chain[table.starts[row] : table.starts[row + 1]]
        # What a copy adds to its ids is spread and salted once for all.
        start = copy * table.num_ids * _SPREAD + salt & _MASK
        if not self.common_depth or not copy:
            return _packer(len(ids)).pack(*[i * _SPREAD + start & _MASK for i in ids])
        common, own = ids[: self.common_depth], ids[self.common_depth :]
        digests = [i * _SPREAD + salt & _MASK for i in common]
        digests += [i * _SPREAD + start & _MASK for i in own]
        return _packer(len(ids)).pack(*digests)


_PACKERS: dict[int, Struct] = {}


def _packer(count: int) -> Struct:
    if count not in _PACKERS:
        _PACKERS[count] = Struct(f">{count}Q")
    return _PACKERS[count]


def unpack_key(key: bytes) -> tuple[int, ...]:
    """Return the routing hashes of a key as numbers."""
    return _packer(len(key) // 8).unpack(key)


def pack_key(digests: list[int]) -> bytes:
    """Return routing hashes given as numbers the way the wire carries them."""
    return _packer(len(digests)).pack(*digests)
