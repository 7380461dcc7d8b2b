"""A waiting job as the scheduler sees it: what its pointer on an ingress stream says."""

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from tidemill.protocol.errors import InvalidRequest, MalformedMessage
from tidemill.protocol.ids import shard_of
from tidemill.protocol.prefix import ROUTING_HASH_BYTES
from tidemill.protocol.values import MAX_COUNT

#: Routing keys above this would be prompts of more than four million tokens.
MAX_KEY_BYTES = 1 << 19
MAX_COST = 1 << 32
_MAX_TIME_MS = 1 << 53

#: Queues whose tenants are remembered.
_MAX_QUEUES = 1024

_QUEUE = re.compile(r"p[012]:[A-Za-z0-9_.\-]{1,64}")

#: Place in the order: routing key, then the pointer's entry id, then the job id as tie-break.
SortKey = tuple[bytes, int, int, str]


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """One undispatched job; ``cost`` is its prompt's length in tokens.

    ``attempts`` counts dispatches, ``crashes`` those in a row whose worker died without a token.
    """

    job_id: str
    queue: str
    entry_id: str
    model: str
    key: bytes = b""
    cost: int = 0
    attempts: int = 0
    priority: int = 0
    crashes: int = 0
    #: The worker that had the job last, empty if none had.
    last_worker: str = ""
    #: When its pointer was written, in seconds on the monotonic clock of this process.
    since: float = 0.0
    #: Whether ``cost`` is a guess, which is good for credit and nothing else.
    is_estimated: bool = False
    #: Bound on its output tokens, 0 if it has none of its own.
    max_tokens: int = 0
    #: When it must have ended, on the clock of ``since``.
    deadline: float = math.inf
    #: Leading hashes of ``key`` (0 or 1) that stand for a caller's prefix id and not for tokens.
    hint_depth: int = 0
    #: Sequences that it becomes once its prompt is computed.
    num_outputs: int = 1

    @property
    def tenant(self) -> str:
        """Whose job it is."""
        return _tenant_of(self.queue)

    @property
    def priority_class(self) -> int:
        """Its class of priority: 0 interactive, 1 standard, 2 batch."""
        return int(self.priority >= 0) + int(self.priority > 0)

    @property
    def kv_key(self) -> bytes:
        """The hashes of ``key`` that stand for tokens."""
        return self.key[self.hint_depth * ROUTING_HASH_BYTES :]

    @property
    def sort_key(self) -> SortKey:
        """Depth-first position in the radix tree of all prompts, then submission order."""
        milliseconds, number = entry_number(self.entry_id)
        return (self.key, milliseconds, number, self.job_id)

    @property
    def is_tokenized(self) -> bool:
        """Whether its producer made the tokens; a tokenised prompt costs at least one."""
        return self.cost > 0


@lru_cache(_MAX_QUEUES)
def _tenant_of(queue: str) -> str:
    # One object for all jobs of a tenant: it is asked for, and looked up, many times for each.
    return queue.partition(":")[2]


def entry_number(entry_id: str) -> tuple[int, int]:
    """Return a stream entry id as numbers that compare as the server compares ids.

    Raises ``MalformedMessage``.
    """
    milliseconds, _, number = entry_id.partition("-")
    try:
        return int(milliseconds), int(number)
    except ValueError as error:
        raise MalformedMessage(f"{entry_id[:40]!r} is not an entry id") from error


def is_queue_name(name: str) -> bool:
    """Whether ``name`` can be an ingress queue: ``<priority class>:<tenant>``."""
    return _QUEUE.fullmatch(name) is not None


def parse_pointer(
    shard: str,
    queue: str,
    entry_id: str,
    fields: Mapping[bytes, bytes],
    since: float = 0.0,
    clock_offset: float = 0.0,
) -> WaitingJob:
    """Read one entry of an ingress stream; raises ``MalformedMessage`` naming the field.

    ``clock_offset`` is the clock of ``since`` minus the server's Unix time, in seconds.
    """
    job_id = _text(fields, b"j")
    try:
        found = shard_of(job_id)
    except InvalidRequest as error:
        raise MalformedMessage(f"j: {error.message}") from error
    if found != shard:
        raise MalformedMessage(f"j: {job_id} belongs to shard {found}, not {shard}")
    return WaitingJob(
        job_id=job_id,
        queue=queue,
        entry_id=entry_id,
        model=_model(fields),
        key=_key(fields),
        cost=_number(fields, b"c", 0, MAX_COST),
        attempts=_number(fields, b"a", 0, 2**31),
        priority=_number(fields, b"p", -(2**31), 2**31),
        since=since,
        max_tokens=_optional(fields, b"o", MAX_COUNT + 1),
        deadline=_deadline(fields, clock_offset),
        hint_depth=_optional(fields, b"g", 2),
        num_outputs=_optional(fields, b"s", MAX_COUNT + 1) or 1,
    )


def _field(fields: Mapping[bytes, bytes], name: bytes) -> bytes:
    if name not in fields:
        raise MalformedMessage(f"{name.decode()}: missing")
    return fields[name]


def _text(fields: Mapping[bytes, bytes], name: bytes) -> str:
    try:
        return _field(fields, name).decode()
    except UnicodeDecodeError as error:
        raise MalformedMessage(f"{name.decode()}: not UTF-8") from error


def _model(fields: Mapping[bytes, bytes]) -> str:
    model = _text(fields, b"m")
    if not 1 <= len(model) <= 256:
        raise MalformedMessage(f"m: a model's name has 1 to 256 characters, not {len(model)}")
    # There are few models and many jobs.
    return sys.intern(model)


def _key(fields: Mapping[bytes, bytes]) -> bytes:
    key = _field(fields, b"h")
    if len(key) % ROUTING_HASH_BYTES or len(key) > MAX_KEY_BYTES:
        raise MalformedMessage(f"h: {len(key)} bytes are not whole routing hashes")
    return key


def _optional(fields: Mapping[bytes, bytes], name: bytes, high: int) -> int:
    # Pointers that were written before these fields existed lack them.
    return _number(fields, name, 0, high) if name in fields else 0


def _deadline(fields: Mapping[bytes, bytes], clock_offset: float) -> float:
    milliseconds = _optional(fields, b"d", _MAX_TIME_MS)
    return milliseconds / 1000 + clock_offset if milliseconds else math.inf


def _number(fields: Mapping[bytes, bytes], name: bytes, low: int, high: int) -> int:
    text = _field(fields, name)
    # Bounded before int(): a million digits must not stall the loop.
    if not re.fullmatch(rb"-?\d{1,20}", text) or not low <= int(text) < high:
        raise MalformedMessage(f"{name.decode()}: {text[:20]!r} is not a whole number in range")
    return int(text)
