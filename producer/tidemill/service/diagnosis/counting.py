"""Do the counters agree with what they count?"""

from collections.abc import Mapping, Set

import redis

from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.stored import stored_numbers, stored_text
from tidemill.service.diagnosis.damage import kept_bytes
from tidemill.service.diagnosis.replies import Command, read

#: Queues and tenants that are looked at in one go.
MAX_QUEUES = 1000
#: Ended jobs whose bytes are added up in one go.
_MAX_ENDED = 5000
_CLASSES = ("p0", "p1", "p2")


def read_miscounts(client: redis.Redis, keys: ShardKeys) -> Mapping[str, int]:
    """Return the counters that are off, with their difference from what they count."""
    counters, names, num_ended = read(
        client,
        [
            ("HKEYS", keys.counters),
            ("ZRANGE", keys.active_queues, 0, MAX_QUEUES - 1),
            ("ZCARD", keys.ended),
        ],
    )
    tenants = {stored_text(name)[2:] for name in counters if name.startswith(b"q:")}
    tenants |= {stored_text(name).partition(":")[2] for name in names}
    some = sorted(tenants)[:MAX_QUEUES]
    streams = [keys.ingress(f"{kind}:{tenant}") for tenant in some for kind in _CLASSES]
    ended: list[Command] = [("ZRANGE", keys.ended, 0, -1)] if num_ended <= _MAX_ENDED else []
    # One instant, or jobs on the move would look miscounted.
    counts, num_running, num_delayed, *rest = read(
        client,
        [
            ("HGETALL", keys.counters),
            ("ZCARD", keys.running),
            ("ZCARD", keys.delayed),
            *(("XLEN", stream) for stream in streams),
            *ended,
        ],
        at_once=True,
    )
    lengths = rest[: len(streams)]
    waiting = {
        tenant: sum(lengths[index * len(_CLASSES) : (index + 1) * len(_CLASSES)])
        for index, tenant in enumerate(some)
    }
    numbers = stored_numbers(counts)
    differences = queued_differences(
        numbers, waiting, int(num_delayed), complete=len(some) == len(tenants)
    )
    differences |= _other_differences(numbers, int(num_running))
    if ended:
        differences["rb"] = numbers.get("rb", 0) - sum(kept_bytes(m) or 0 for m in rest[-1])
    unreadable = {stored_text(name) for name in counts} - numbers.keys()
    return {c: by for c, by in differences.items() if by and not _spoilt(c, unreadable)}


def _spoilt(counter: str, unreadable: Set[str]) -> bool:
    """Whether a difference comes from a counter that is no number: that is another finding."""
    kind, _, tenant = counter.partition(":")
    if kind == "qb" or tenant == "*":
        kinds = ("qb", "q:", "r:") if kind == "qb" else (f"{kind}:",)
        return any(name.startswith(kinds) for name in unreadable)
    return counter in unreadable or (kind == "qt" and f"q:{tenant}" in unreadable)


def queued_differences(
    counts: Mapping[str, int], waiting: Mapping[str, int], num_delayed: int, *, complete: bool
) -> dict[str, int]:
    """Compare ``q:<tenant>`` with each tenant's pointers and the shard's delayed jobs.

    Whose the delayed jobs are is not known at one instant: while there are some, only their sum
    and what is too small for a tenant's pointers can be told; ``q:*`` stands for the sum.
    """
    excess = {tenant: counts.get(f"q:{tenant}", 0) - num for tenant, num in waiting.items()}
    if not num_delayed:
        return {f"q:{tenant}": by for tenant, by in excess.items()}
    short = {f"q:{tenant}": by for tenant, by in excess.items() if by < 0}
    if short or not complete:
        return short
    return {"q:*": sum(excess.values()) - num_delayed}


def _other_differences(counts: Mapping[str, int], num_running: int) -> dict[str, int]:
    differences = {"r:*": _sum(counts, "r:") - num_running}
    # Tokens and bytes belong to jobs: without these there are none.
    for name, count in counts.items():
        kind, _, tenant = name.partition(":")
        if kind == "qt" and f"q:{tenant}" not in counts:
            differences[name] = count
    if not _sum(counts, "q:") and not num_running:
        differences["qb"] = counts.get("qb", 0)
    return differences


def _sum(counts: Mapping[str, int], prefix: str) -> int:
    return sum(count for name, count in counts.items() if name.startswith(prefix))
