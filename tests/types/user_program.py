"""What a program of a user's says, and which types it gets: checked by mypy in strict mode."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, closing
from typing import TypedDict, assert_type

from tidemill import (
    AsyncJob,
    AsyncProducer,
    Chunk,
    Embeddings,
    EmbedSpec,
    Job,
    JobSpec,
    MapProgress,
    Producer,
    Ranked,
    Result,
    Scores,
    TidemillError,
    Transcription,
    Watch,
)


class Row(TypedDict):
    """A row of a dataset."""

    id: int
    text: str


def rows() -> Iterator[Row]:
    """Return a dataset that has no end."""
    number = 0
    while True:
        yield {"id": number, "text": "..."}
        number += 1


def ask(row: Row) -> str:
    """Return the prompt of a row."""
    return f"Summarise: {row['text']}"


def follow(told: MapProgress) -> None:
    """Show how far a map is."""
    print(told.done, told.total)


def map_rows(producer: Producer) -> None:
    """Every form of ``map`` has its own type."""
    with closing(producer.map(rows(), prompt=ask, key="id", key_prefix="r")) as results:
        for result in results:
            assert_type(result, Result)
    for row, result in producer.map(rows(), prompt=ask, with_items=True, progress=follow):
        assert_type(row, Row)
        assert_type(result, Result)
    for outcome in producer.map(["a"], return_exceptions=True, max_tokens=3, ordered=False):
        assert_type(outcome, Result | TidemillError)
    for text, either in producer.map(["a"], return_exceptions=True, with_items=True, timeout=9.0):
        assert_type(text, str)
        assert_type(either, Result | TidemillError)
    for result in producer.map([EmbedSpec("a"), JobSpec([1], seed=1)]):
        assert_type(Embeddings.of(result).vectors, tuple[tuple[float, ...], ...])
    by_column = producer.map([{"q": "a"}], prompt="q", key=lambda row: row["q"], max_in_flight=9)
    assert_type(next(by_column), Result)


def collect(producer: Producer) -> None:
    """A batch has typed jobs and results."""
    with producer.batch("night", size=10, max_tokens=5, priority=1) as batch:
        assert_type(batch.submit("a", temperature=0.5, idempotency_key="k"), int)
    assert_type(batch.jobs, list[Job | TidemillError])
    assert_type(batch.ids, list[str])
    assert_type(batch.results(), list[Result])
    assert_type(batch.results(5.0, return_exceptions=True), list[Result | TidemillError])
    assert_type(batch.status().unfinished, int)


def call_back(producer: Producer) -> None:
    """Functions that are called get what they are called for."""
    job = producer.submit([{"role": "user", "content": "a"}], max_tokens=3)

    def on_token(chunk: Chunk) -> None:
        print(chunk.text)

    watch = job.watch(on_token=on_token, on_done=lambda result: print(result.text))
    assert_type(watch, Watch)


def converse(producer: Producer) -> None:
    """An answer goes into the next prompt."""
    messages = [{"role": "user", "content": "a"}]
    first = producer.generate(messages, timeout=10.0, max_tokens=3)
    assert_type(first, Result)
    producer.generate([*messages, first.message, {"role": "user", "content": "b"}])


def other_kinds(producer: Producer) -> None:
    """Each kind of job has a type of its own."""
    assert_type(producer.embed(["a"], dimensions=2), Embeddings)
    assert_type(producer.score("a", ["b"]), Scores)
    assert_type(producer.rerank("a", ["b"], top_n=1), list[Ranked])
    assert_type(producer.transcribe("a.wav", language="de"), Transcription)


async def asynchronous() -> None:
    """The twin has the same types."""
    async with AsyncProducer(tenant="red") as producer:
        async with aclosing(producer.map(rows(), prompt=ask, with_items=True)) as pairs:
            async for row, result in pairs:
                assert_type(row, Row)
                assert_type(result, Result)
        async for outcome in producer.map(["a"], return_exceptions=True):
            assert_type(outcome, Result | TidemillError)
        async with producer.batch() as batch:
            assert_type(await batch.submit("a"), int)
        assert_type(batch.jobs, list[AsyncJob | TidemillError])
        assert_type(await batch.results(), list[Result])
        job = await producer.submit("a")
        await job.watch(on_done=lambda result: asyncio.sleep(result.usage.cached_tokens)).wait()
        assert_type(await producer.generate("a", timeout=1.0), Result)


def mistakes(producer: Producer) -> None:
    """What is wrong is found before it runs: an ignored error that is none is one itself."""
    producer.submit("a", max_token=3)  # type: ignore[call-arg]
    producer.map(["a"], ordered="yes")  # type: ignore[call-overload]
    producer.map(["a"], max_token=3)  # type: ignore[call-overload]
    producer.batch(temperature="hot")  # type: ignore[arg-type]
    producer.submit("a").watch(on_done=follow)  # type: ignore[arg-type]
    producer.generate(7)  # type: ignore[arg-type]
