"""A mill that works by itself, and what is open in it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import redis

from support.fake_mill import KEYS, Attempt, FakeMill
from tidemill.service.redis import connect


@contextmanager
def serving(url: str, work: Callable[[Attempt], object]) -> Iterator[None]:
    """A mill that works on every job on a thread of its own."""
    stop = threading.Event()
    with connect(url) as client:
        mill = FakeMill(client)
        thread = threading.Thread(target=mill.serve, args=(work, stop))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            mill.end_all()


def num_open(client: redis.Redis) -> int:
    """Jobs that have not ended."""
    counts = client.hgetall(KEYS.counters)
    return sum(int(count) for name, count in counts.items() if name[:2] in (b"q:", b"r:"))


def num_jobs(client: redis.Redis) -> int:
    """Jobs that there are."""
    return sum(1 for _ in client.scan_iter(match=KEYS.job("*")))


def by_prompt(attempt: Attempt) -> None:
    """Say as many tokens as the prompt's last id tells."""
    assert attempt.request.prompt_ids is not None
    attempt.finish(attempt.request.prompt_ids[-1])
