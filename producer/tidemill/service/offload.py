"""Long work beside an event loop, a few pieces at a time."""

import asyncio
from asyncio import AbstractEventLoop, Future, Semaphore
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

#: Pieces of work that run at once for one loop; more would only take processors and threads from
#: what else the process does.
MAX_AT_ONCE = 2

_turns: WeakKeyDictionary[AbstractEventLoop, Semaphore] = WeakKeyDictionary()


async def beside_loop(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread as soon as it is its turn; raises what it raises.

    The order is that of the calls.  Work that has begun is finished, and keeps its place until
    then, whether or not somebody still waits for it.
    """
    loop = asyncio.get_running_loop()
    turns = _turns.setdefault(loop, Semaphore(MAX_AT_ONCE))
    await turns.acquire()

    def leave(_: Future[T]) -> None:
        turns.release()

    try:
        future = loop.run_in_executor(None, work)
    except BaseException:
        turns.release()
        raise
    future.add_done_callback(leave)
    return await asyncio.shield(future)
