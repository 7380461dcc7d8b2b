"""What ends a request where nobody handles it: faults, and the drain."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, cast

import httpx2 as httpx
import pytest
from starlette.types import ASGIApp, Message

from tidemill.async_job import AsyncJob
from tidemill.gateway.app import create_app
from tidemill.gateway.call import Call
from tidemill.gateway.config import GatewaySettings
from tidemill.gateway.errors import STOPPING
from tidemill.gateway.failures import Failures
from tidemill.gateway.jobs import RequestJobs
from tidemill.gateway.shaping.messages import error_event
from tidemill.gateway.sse import EventStream
from tidemill.gateway.state import GatewayState


async def test_a_fault_is_answered_counted_and_logged_like_any_other_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = GatewayState(GatewaySettings(allowed_origins=("https://app.example",)))
    app = create_app(state)

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("a secret")

    headers = {"origin": "https://app.example", "x-request-id": "mine"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        answer = await client.get("/broken", headers=headers)
    await state.close()
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["x-request-id"] == "mine" and "secret" not in answer.text
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert b'requests_total{method="GET",route="/broken",status="500"} 1.0' in state.metrics.text()
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.exc_info is not None and "GET /broken" in record.message


async def cut(app: ASGIApp, *, is_draining: bool = True) -> tuple[list[Message], bool]:
    """Cancel a request that waits; returns what was sent and whether that cancelled its task."""
    sent: list[Message] = []
    waits = asyncio.Event()

    async def receive() -> Message:
        waits.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody leaves")

    async def send(message: Message) -> None:
        sent.append(message)

    state = cast(GatewayState, SimpleNamespace(is_draining=is_draining))
    scope = {"type": "http", "method": "POST", "path": "/"}
    request: asyncio.Future[None] = asyncio.ensure_future(
        cast(Any, Failures(app, state)(scope, receive, send))
    )
    await waits.wait()
    request.cancel()
    await asyncio.wait([request])
    return sent, request.cancelled()


async def whole(scope: Any, receive: Any, send: Any) -> None:
    await receive()


async def test_a_whole_answer_that_the_drain_cuts_off_is_told_to_try_elsewhere() -> None:
    [start, body], was_cancelled = await cut(whole)
    assert start["status"] == 503 and (b"retry-after", b"1") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == "stopping"
    assert not was_cancelled, "the server would log a traceback"


async def test_what_is_cancelled_without_a_drain_stays_so() -> None:
    assert await cut(whole, is_draining=False) == ([], True)


async def silence() -> AsyncGenerator[bytes]:
    await asyncio.Event().wait()
    yield b""


@pytest.mark.parametrize(
    ("options", "last"),
    [
        ({}, b"data: %b\n\ndata: [DONE]\n\n" % STOPPING.encoded()),
        ({"last": b""}, b"data: %b\n\n" % STOPPING.encoded()),
        ({"last": b"", "error_event": error_event}, error_event(STOPPING)),
    ],
    ids=["OpenAI", "jobs", "Anthropic"],
)
async def test_a_stream_that_the_drain_cuts_off_ends_in_its_own_form(
    options: dict[str, Any], last: bytes
) -> None:
    sent, was_cancelled = await cut(EventStream(silence(), **options))
    assert [message.get("body") for message in sent] == [None, last]
    assert sent[-1]["more_body"] is False and not was_cancelled


async def test_a_fault_behind_one_of_several_choices_ends_their_stream() -> None:
    class Broken:
        def stream(self) -> None:
            raise RuntimeError("a fault")

    call = cast(Call, SimpleNamespace(state=None, account=None))
    jobs = RequestJobs(call, [cast(AsyncJob, Broken())] * 2, outlive=True)
    with pytest.raises(RuntimeError, match="a fault"):
        async with asyncio.timeout(5), aclosing(jobs.pieces()) as pieces:
            await anext(pieces)
