"""Heeding a cancellation that redis-py lets slip."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heeding_cancellation() -> Iterator[None]:
    """Raise the ``CancelledError`` that what runs in here swallowed.

    redis-py sends through ``asyncio.wait_for``, which up to Python 3.11 forgets a cancellation that
    arrives just as the sending ends; the task would then wait for ever (python/cpython#86296).
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    yield
    if task and task.cancelling() > before:
        raise asyncio.CancelledError
