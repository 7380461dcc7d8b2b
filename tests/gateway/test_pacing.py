"""A stream tells its first token at once, its last at the end, and the others some at a time."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from tidemill import Chunk
from tidemill.gateway.config import GatewaySettings, parse_arguments
from tidemill.gateway.jobs import Piece
from tidemill.gateway.openai_models.chat import ChatRequest
from tidemill.gateway.openai_models.completions import CompletionRequest
from tidemill.gateway.pacing import paced
from tidemill.protocol.errors import ConfigError, JobFailed
from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.messages import JobEnd
from tidemill.service.config import load_config

END = JobEnd(state="done", finish_reason="length")


def chunk(start: int, size: int, choice: int = 0) -> Chunk:
    ids = tuple(range(start, start + size))
    logprobs = tuple(TokenLogprobs(logprob=-1.0 * i, rank=1) for i in ids)
    text = "".join(chr(97 + i) for i in ids)
    return Chunk(start, start + size, ids, text, f"1-{start + size}", logprobs, choice)


def told(batches: Sequence[list[Piece]], least: int, error: Exception | None = None) -> Any:
    async def arriving() -> AsyncGenerator[list[Piece]]:
        for batch in batches:
            yield batch
        if error is not None:
            raise error

    async def read() -> list[Piece]:
        pieces: list[Piece] = []
        try:
            async for some in paced(arriving(), least):
                assert some, "nothing is no news"
                pieces += some
        except JobFailed:
            pieces.append(Piece(-1))
        return pieces

    return asyncio.run(read())


def singles(size: int) -> list[list[Piece]]:
    return [[Piece(0, chunk(i, 1))] for i in range(size)]


def test_but_for_the_first_and_the_last_no_event_has_fewer_tokens() -> None:
    pieces = told([*singles(9), [Piece(0, end=END)]], 3)
    assert [len(p.chunk.ids) for p in pieces[:-1]] == [1, 3, 3, 2]
    assert pieces[-1] == Piece(0, end=END)
    assert pieces[1].chunk == chunk(1, 3), "as if its tokens had come together"


def test_more_tokens_than_that_are_told_at_once() -> None:
    batches = [[Piece(0, chunk(0, 2))], [Piece(0, chunk(2, 5))], [Piece(0, end=END)]]
    assert told(batches, 4) == [piece for batch in batches for piece in batch]


def test_every_choice_of_every_job_is_held_for_itself() -> None:
    first = [Piece(0, chunk(0, 1)), Piece(0, chunk(1, 1, choice=1)), Piece(1, chunk(0, 1))]
    held = [Piece(0, chunk(2, 1)), Piece(0, chunk(3, 1, choice=1)), Piece(1, chunk(1, 1))]
    end = [Piece(1, end=END)]
    assert told([first, held, end], 5) == [*first, held[2], *end]


def test_one_token_at_a_time_is_passed_on_as_it_comes() -> None:
    batches = [[Piece(0, chunk(0, 1)), Piece(0, chunk(1, 1))], [Piece(0, end=END)]]
    assert told(batches, 1) == [piece for batch in batches for piece in batch]


def test_what_is_held_is_told_before_an_error() -> None:
    pieces = told(singles(3), 10, JobFailed("it failed", job_id="j", state="failed"))
    assert pieces == [Piece(0, chunk(0, 1)), Piece(0, chunk(1, 2)), Piece(-1)]


@pytest.mark.parametrize(
    ("model", "prompt"), [(ChatRequest, {"messages": []}), (CompletionRequest, {"prompt": "a"})]
)
def test_an_interval_is_one_token_or_more(model: Any, prompt: dict[str, Any]) -> None:
    assert model.model_validate({**prompt, "stream_interval": 4}).stream_interval == 4
    assert model.model_validate(prompt).stream_interval == 1
    for wrong in (0, -1, 1.5, "many"):
        with pytest.raises(ValidationError, match="stream_interval"):
            model.model_validate({**prompt, "stream_interval": wrong})


def test_the_gateway_may_have_a_least_interval() -> None:
    assert parse_arguments(["--stream-interval", "8"], load_config({})).stream_interval == 8
    with pytest.raises(ConfigError, match="--stream-interval is not 1 or more"):
        GatewaySettings(stream_interval=0)
