"""Batches in tests: inputs, what comes out, and a mill that answers their lines."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any

from support.fake_mill import Attempt, FakeMill, generate
from tidemill.batches.client import AsyncBatches
from tidemill.protocol.batches import Batch
from tidemill.protocol.files import StoredFile
from tidemill.service.redis import connect
from tidemill_scheduler.batches.settings import RunnerSettings

ENDPOINT = "/v1/completions"

FAST = RunnerSettings(lease_seconds=0.5, poll_seconds=0.02, model_seconds=0.2)

#: What runs a batch runner with these settings.
StartRunner = Callable[..., AbstractAsyncContextManager["asyncio.Task[None]"]]


def request_line(number: int, **body: Any) -> dict[str, Any]:
    """A valid request, whose prompt names its number."""
    asked = {"model": "m", "prompt": [1, 2, number], "max_tokens": 2, **body}
    return {"custom_id": f"id-{number}", "method": "POST", "url": ENDPOINT, "body": asked}


def jsonl(lines: Iterable[Any]) -> bytes:
    """Lines as a file holds them; bytes stand for themselves."""
    texts = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    return b"".join(text + b"\n" for text in texts)


async def upload(client: AsyncBatches, data: bytes) -> StoredFile:
    """Store an input."""

    async def content() -> AsyncIterator[bytes]:
        yield data

    return await client.create_file(content(), filename="in.jsonl", purpose="batch")


async def create(client: AsyncBatches, lines: Iterable[Any], **options: Any) -> Batch:
    """Store an input and make a batch of it."""
    file = await upload(client, jsonl(lines))
    return await client.create_batch(input_file_id=file.file_id, endpoint=ENDPOINT, **options)


async def content(client: AsyncBatches, file_id: str) -> bytes:
    """What a file holds; nothing if there is none."""
    if not file_id:
        return b""
    _, pieces = await client.content(file_id)
    return b"".join([piece async for piece in pieces])


async def outcome(
    client: AsyncBatches, batch: Batch
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of the output and of the error file."""
    told = batch.plain()
    files = [await content(client, told[f"{kind}_file_id"]) for kind in ("output", "error")]
    output, errors = ([json.loads(line) for line in data.splitlines()] for data in files)
    return output, errors


async def ended(client: AsyncBatches, batch: Batch) -> Batch:
    """Wait for the end of a batch."""
    while not (batch := await client.batch(batch.batch_id)).state.is_terminal:
        await asyncio.sleep(0.02)
    return batch


@contextmanager
def serving(
    url: str, work: Callable[[Attempt], object] | None = None, sizes: tuple[int, ...] = (2,)
) -> Iterator[FakeMill]:
    """A scheduler and a worker on a thread, which do ``work`` for every job."""
    stop = threading.Event()
    with connect(url) as client:
        mill = FakeMill(client)
        thread = threading.Thread(target=mill.serve, args=(work or generate(sizes), stop))
        thread.start()
        try:
            yield mill
        finally:
            stop.set()
            thread.join()
