"""Tasks that run together and end together."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

_AGAIN_SECONDS = 0.25


async def run_together(duties: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run duties that never return by themselves; raises the first error of any of them.

    ``asyncio.TaskGroup`` would cancel only once, see ``end_tasks``.
    """
    tasks = [asyncio.create_task(duty) for duty in duties]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failures = [f for t in tasks if t.done() and not t.cancelled() and (f := t.exception())]
    finally:
        await end_tasks(tasks)
    for failure in failures:
        raise failure


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until every one has ended, however that is; their results are not looked at.

    Once is not enough: redis-py writes under ``asyncio.wait_for``, which up to Python 3.11 drops a
    cancellation that meets the end of the write.
    """
    interrupted = False
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=_AGAIN_SECONDS)
        except asyncio.CancelledError:
            interrupted = True
    for task in tasks:
        if not task.cancelled():
            task.exception()
    if interrupted:
        raise asyncio.CancelledError
