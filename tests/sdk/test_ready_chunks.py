"""Chunks that have arrived can be taken at once, and models and tokenizers be looked up."""

import asyncio

import pytest
import redis

from support.fake_mill import FakeMill, make_tokenizer, text_of
from support.twins import Twin
from support.wait import wait_until_async
from tidemill import AsyncProducer, InvalidRequest, Producer, UnknownModel
from tidemill._async_shared import AsyncShared
from tidemill._listener import MAX_TICK_SECONDS, TICK_SECONDS, wait_seconds


def test_what_has_arrived_is_taken_without_waiting(redis_url: str, mill: FakeMill) -> None:
    with Producer(redis_url) as producer:
        job = producer.submit([1, 2, 3])
        attempt = mill.claim()
        for _ in range(3):
            attempt.say(2)
        with job.stream() as stream:
            first = next(stream)
            more = stream.take_ready()
            assert [chunk.ids for chunk in (first, *more)] == [(0, 1), (2, 3), (4, 5)]
            assert stream.position == 6 and stream.take_ready() == []


async def test_messages_that_wait_are_taken_too(redis_url: str, mill: FakeMill) -> None:
    async with AsyncProducer(redis_url) as producer:
        job = await producer.submit([1, 2, 3])
        attempt = await asyncio.to_thread(mill.claim)
        async with job.stream() as stream:
            attempt.say()
            chunks = [await anext(stream)]
            # Its connection is listening by now or soon; then several messages come at once.
            for _ in range(20):
                attempt.say()

            def has_all() -> bool:
                chunks.extend(stream.take_ready())
                return len(chunks) >= 21

            task = asyncio.create_task(anext(stream))
            chunks.append(await task)
            await wait_until_async(has_all)
            assert stream.position == 21
            attempt.finish()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
    assert "".join(chunk.text for chunk in chunks) == "".join(map(text_of, range(21)))


def test_models_and_their_tokenizers_are_found(producer: Twin, mill: FakeMill) -> None:
    assert [card.name for card in producer.models()] == ["m"]
    tokenizer = producer.tokenizer("m")
    assert tokenizer.digest == make_tokenizer("a", "b", "c").digest
    with pytest.raises(UnknownModel):
        producer.tokenizer("nobody")


async def test_clients_of_many_tenants_share_their_connections(
    redis_url: str, redis_client: redis.Redis, mill: FakeMill
) -> None:
    shared = AsyncShared(10.0)
    clients = [AsyncProducer(redis_url, tenant=f"t{n}", _shared=shared) for n in range(20)]
    jobs = [await client.submit("a b") for client in clients]
    assert len({job.id for job in jobs}) == 20
    tenants = {mill.claim().request.tenant for _ in jobs}
    assert tenants == {f"t{n}" for n in range(20)}
    tokenizers = {id(await client.tokenizer()) for client in clients}
    assert len(tokenizers) == 1
    num_connections = len(redis_client.client_list())
    await clients[0].close()
    # It left open what the others use.
    await clients[1].submit("a")
    assert num_connections < 10
    await shared.close()
    with pytest.raises(InvalidRequest):
        AsyncProducer(redis_url, tenant="a b", _shared=shared)


def test_a_reader_looks_less_often_the_longer_nothing_comes() -> None:
    waits = [wait_seconds("job", None, num_quiet) for num_quiet in (0, 1, 2, 3, 10**6)]
    assert waits == [TICK_SECONDS, 3.0, 6.0, MAX_TICK_SECONDS, MAX_TICK_SECONDS]
