"""What must be left in a shard once every job has ended: nothing."""

import redis

from support.shard import KEYS
from support.valkey import leaked_keys
from tidemill.protocol import calls
from tidemill.protocol.functions import run


def find_leaks(client: redis.Redis) -> list[str]:
    """Name what is left of jobs that have ended.

    Queues that are empty are retired first: that is the leader's duty, at its own pace.
    """
    for queue in client.zrange(KEYS.active_queues, 0, -1):
        run(client, calls.retire(KEYS, queue=queue.decode()))
    indexes = (KEYS.running, KEYS.delayed, KEYS.due, KEYS.active_queues)
    found = [f"{key} has {size}" for key in indexes if (size := client.zcard(key))]
    found += [f"{key.decode()} has pointers" for key in client.scan_iter(KEYS.ingress("*"))]
    found += _listed_for_ever(client)
    found += [f"{key} would live for ever" for key in leaked_keys(client)]
    return found + _wrong_counters(client)


def _listed_for_ever(client: redis.Redis) -> list[str]:
    """Name the jobs on tenants' lists that nothing will ever take off."""
    known = {calls.job_of(member.decode()) for member in client.zrange(KEYS.ended, 0, -1)}
    return [
        f"{key.decode()} has {job_id.decode()}"
        for key in client.scan_iter(KEYS.jobs("*"))
        for job_id in client.zrange(key, 0, -1)
        if job_id.decode() not in known and not client.exists(KEYS.job(job_id.decode()))
    ]


def _wrong_counters(client: redis.Redis) -> list[str]:
    counters = {name.decode(): int(n) for name, n in client.hgetall(KEYS.counters).items()}
    ended = client.zrange(KEYS.ended, 0, -1)
    kept_bytes = sum(int(member.split()[0]) for member in ended)
    if counters.pop("rb", 0) != kept_bytes:
        counters["rb"] = kept_bytes
    return [f"the counter {name} is {value}" for name, value in counters.items()]
