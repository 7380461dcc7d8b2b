"""Waiting for a condition instead of sleeping and hoping."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_INTERVAL_SECONDS = 0.01
#: For what takes a moment, on a machine that is busy with other things for as long as it likes.
_PATIENCE_SECONDS = 30.0


def wait_until(predicate: Callable[[], T], timeout: float = _PATIENCE_SECONDS, what: str = "") -> T:
    """Call ``predicate`` until it is true; return its value, or fail after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise _failure(predicate, timeout, what)
        time.sleep(_INTERVAL_SECONDS)
    return value


async def wait_until_async(
    predicate: Callable[[], T], timeout: float = _PATIENCE_SECONDS, what: str = ""
) -> T:
    """``wait_until`` that lets the event loop run in between."""
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise _failure(predicate, timeout, what)
        await asyncio.sleep(_INTERVAL_SECONDS)
    return value


def _failure(predicate: Callable[[], object], timeout: float, what: str) -> AssertionError:
    return AssertionError(f"not within {timeout} s: {what or predicate}")
