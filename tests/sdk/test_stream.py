"""A stream gives every token once, whatever happens between the reader and the log."""

import threading
from typing import Self

import pytest
import redis

from support.fake_mill import KEYS, Attempt, FakeMill, text_of
from support.twins import Stream, Twin
from support.wait import wait_until
from tidemill import (
    Chunk,
    InvalidRequest,
    JobCancelled,
    JobFailed,
    JobNotFinished,
    JobNotFound,
    Producer,
)
from tidemill.protocol.ids import new_job_id


def submit(producer: Twin, mill: FakeMill) -> Attempt:
    job_id = producer.submit([1, 2, 3], max_tokens=100).id
    attempt = mill.claim()
    assert attempt.job_id == job_id
    return attempt


def take(stream: Stream, num_tokens: int) -> list[Chunk]:
    chunks: list[Chunk] = []
    while stream.position < num_tokens:
        chunks.append(next(stream))
    return chunks


def assert_whole(chunks: list[Chunk], num_tokens: int, start: int = 0) -> None:
    assert [token for chunk in chunks for token in chunk.ids] == list(range(start, num_tokens))
    expected = "".join(text_of(position) for position in range(start, num_tokens))
    assert "".join(chunk.text for chunk in chunks) == expected
    starts = [chunk.start for chunk in chunks]
    assert starts == [start, *(chunk.end for chunk in chunks[:-1])]


def listeners(client: redis.Redis) -> list[int]:
    clients = client.client_list(_type="pubsub")
    return [int(entry["id"]) for entry in clients]


def kill_listeners(client: redis.Redis) -> None:
    ids = wait_until(lambda: listeners(client), what="a subscribed connection")
    for client_id in ids:
        client.client_kill_filter(_id=str(client_id))


def wait_for_subscriber(client: redis.Redis, job_id: str) -> None:
    channel = KEYS.token_channel(job_id)
    wait_until(lambda: client.pubsub_shardnumsub(channel)[0][1] > 0, what="a subscriber")


class Reader:
    """Reads a stream on a thread of its own; a context manager that waits for the stream's end."""

    def __init__(self, stream: Stream) -> None:
        self.chunks: list[Chunk] = []
        self._stream = stream
        self._thread = threading.Thread(target=self._read)

    @property
    def num_tokens(self) -> int:
        return self.chunks[-1].end if self.chunks else 0

    def wait_for(self, num_tokens: int) -> None:
        wait_until(lambda: self.num_tokens >= num_tokens, what=f"{num_tokens} tokens")

    def _read(self) -> None:
        for chunk in self._stream:
            self.chunks.append(chunk)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()


def test_a_stream_gives_out_tokens_as_they_are_written(producer: Twin, mill: FakeMill) -> None:
    attempt = submit(producer, mill)
    stream = producer.stream(attempt.job_id)
    attempt.say(2)
    assert next(stream) == Chunk(0, 2, (0, 1), "w0 w1 ", "1-2")
    attempt.say(1)
    assert next(stream) == Chunk(2, 3, (2,), "w2 ", "1-3")
    assert stream.end is None
    attempt.finish(1, tail="!")
    last = next(stream)
    assert (last.ids, last.text) == ((3,), "w3 !")
    assert list(stream) == []
    assert stream.end is not None and stream.end.finish_reason == "stop"


def test_a_stream_of_a_job_without_output_ends(producer: Twin, mill: FakeMill) -> None:
    attempt = submit(producer, mill)
    attempt.finish()
    stream = producer.stream(attempt.job_id)
    assert list(stream) == []
    assert stream.end is not None and stream.end.state == "done"


def test_text_held_back_to_the_end_is_a_chunk_without_ids(producer: Twin, mill: FakeMill) -> None:
    attempt = submit(producer, mill)
    attempt.say(1)
    attempt.finish(tail="...")
    chunks = list(producer.stream(attempt.job_id))
    assert [(chunk.ids, chunk.text) for chunk in chunks] == [((0,), "w0 "), ((), "...")]


def test_a_stream_arriving_late_reads_the_log(producer: Twin, mill: FakeMill) -> None:
    attempt = submit(producer, mill)
    for size in (1, 3, 2):
        attempt.say(size)
    attempt.finish(1)
    assert_whole(list(producer.stream(attempt.job_id)), 7)


def test_a_log_longer_than_a_page_is_read_whole(producer: Twin, mill: FakeMill) -> None:
    attempt = submit(producer, mill)
    for _ in range(1100):
        attempt.say()
    attempt.finish()
    assert_whole(list(producer.stream(attempt.job_id)), 1100)


@pytest.mark.parametrize("by", ["event id", "position"])
def test_a_stream_resumes_where_another_stopped(producer: Twin, mill: FakeMill, by: str) -> None:
    attempt = submit(producer, mill)
    for size in (2, 3, 1):
        attempt.say(size)
    first = take(producer.stream(attempt.job_id), 5)
    after: str | int = first[-1].event_id if by == "event id" else first[-1].end
    resumed = producer.stream(attempt.job_id, after=after)
    assert resumed.position == 5
    attempt.finish(1)
    assert_whole(first + list(resumed), 7)


def test_a_stream_resumed_after_its_last_event_only_ends(producer: Twin, mill: FakeMill) -> None:
    attempt = submit(producer, mill)
    attempt.say(2)
    attempt.finish(tail="!")
    last = list(producer.stream(attempt.job_id))[-1]
    resumed = producer.stream(attempt.job_id, after=last.event_id)
    assert list(resumed) == []
    assert resumed.end is not None and resumed.end.state == "done"


@pytest.mark.parametrize("after", ["x", "1-", "-1", "1-2-3", "٣-٣", "9" * 17 + "-1", -1])
def test_a_position_that_is_none_is_refused(producer: Twin, after: str | int) -> None:
    with pytest.raises(InvalidRequest, match="neither an event id") as refusal:
        producer.stream(new_job_id(), after=after)
    assert refusal.value.field == "after"


def test_a_position_inside_a_chunk_is_refused(producer: Twin, mill: FakeMill) -> None:
    attempt = submit(producer, mill)
    attempt.say(4)
    with pytest.raises(InvalidRequest, match="inside the chunk 0-4") as refusal:
        next(producer.stream(attempt.job_id, after=3))
    assert refusal.value.fix == "Resume after 0 or 4."


def test_a_stream_goes_on_after_a_crash_of_its_worker(producer: Twin, mill: FakeMill) -> None:
    attempt = submit(producer, mill)
    stream = producer.stream(attempt.job_id)
    attempt.say(3)
    chunks = take(stream, 3)
    attempt.say(2)
    attempt.crash()
    second = mill.reclaim(attempt)
    second.say(2)
    second.finish(1)
    chunks += stream
    assert_whole(chunks, 8)
    assert chunks[-1].event_id.endswith("-8")


def test_a_killed_subscription_costs_no_token(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    attempt = submit(producer, mill)
    with Reader(producer.stream(attempt.job_id)) as reader:
        for num_tokens in range(1, 6):
            wait_for_subscriber(redis_client, attempt.job_id)
            kill_listeners(redis_client)
            attempt.say()
            reader.wait_for(num_tokens)
        kill_listeners(redis_client)
        attempt.finish(2)
    assert_whole(reader.chunks, 7)


def test_tokens_are_not_waited_for_until_the_next_look(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    attempt = submit(producer, mill)
    with Reader(producer.stream(attempt.job_id)) as reader:
        wait_for_subscriber(redis_client, attempt.job_id)
        before = redis_client.info("commandstats")["cmdstat_xrange"]["calls"]
        for num_tokens in range(1, 101):
            attempt.say()
            reader.wait_for(num_tokens)
        looks = redis_client.info("commandstats")["cmdstat_xrange"]["calls"] - before
        attempt.finish()
    # A token read from the log alone would cost a look; only the ticks of slow machines may.
    assert looks < 50
    assert_whole(reader.chunks, 100)


def test_a_failed_job_raises_after_its_last_token(producer: Twin, mill: FakeMill) -> None:
    attempt = submit(producer, mill)
    attempt.say(2)
    attempt.finish(state="failed", error="the engine broke")
    stream = producer.stream(attempt.job_id)
    assert_whole(take(stream, 2), 2)
    with pytest.raises(JobFailed, match="the engine broke") as failure:
        next(stream)
    assert failure.value.state == "failed"


def test_a_cancelled_job_raises_after_its_last_token(producer: Twin, mill: FakeMill) -> None:
    attempt = submit(producer, mill)
    attempt.say(2)
    stream = producer.stream(attempt.job_id)
    chunks = take(stream, 2)
    assert producer.cancel(attempt.job_id) == "cancelled"
    with pytest.raises(JobCancelled):
        next(stream)
    assert_whole(chunks, 2)


def test_a_stream_without_a_token_in_time_says_so(producer: Twin, mill: FakeMill) -> None:
    attempt = submit(producer, mill)
    stream = producer.stream(attempt.job_id, timeout=0.05)
    with pytest.raises(JobNotFinished):
        next(stream)
    attempt.finish(1)
    assert_whole(list(stream), 1)


def test_a_stream_of_an_unknown_job_says_so(producer: Twin, redis_client: redis.Redis) -> None:
    with pytest.raises(JobNotFound):
        next(producer.stream(new_job_id()))


@pytest.mark.parametrize("job_id", ["", "job_00", "job_zz0123456789ABCDEFGHJKMNPQ", "x" * 500])
def test_what_is_no_job_id_is_refused(producer: Twin, job_id: str) -> None:
    with pytest.raises(InvalidRequest, match="job_id"):
        producer.stream(job_id)


@pytest.mark.parametrize("taken", [0, 2, 5, 6, 7])
def test_an_expired_log_is_made_up_from_the_result(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis, taken: int
) -> None:
    attempt = submit(producer, mill)
    for size in (2, 3, 1):
        attempt.say(size)
    attempt.finish(1, tail="!")
    live = list(producer.stream(attempt.job_id))
    redis_client.delete(KEYS.token_log(attempt.job_id))
    late = list(producer.stream(attempt.job_id, after=taken))
    expected = [chunk for chunk in live if chunk.end > taken]
    assert [(c.start, c.end, c.ids, c.text) for c in late] == [
        (c.start, c.end, c.ids, c.text) for c in expected
    ]
    for chunk in late:
        rest = list(producer.stream(attempt.job_id, after=chunk.event_id))
        assert rest == [other for other in late if other.end > chunk.end]


@pytest.mark.parametrize("phase", ["running", "ended", "expired"])
@pytest.mark.parametrize("by", ["event id", "position"])
def test_a_stream_resumes_from_every_chunk_of_every_attempt(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis, phase: str, by: str
) -> None:
    attempt = submit(producer, mill)
    stream = producer.stream(attempt.job_id)
    for size in (1, 3):
        attempt.say(size)
    attempt.crash()
    second = mill.reclaim(attempt)
    for size in (2, 1, 4):
        second.say(size)
    before = take(stream, 11)
    resumed: dict[int, Stream] = {}
    late: dict[int, list[Chunk]] = {}
    for chunk in before:
        after: str | int = chunk.event_id if by == "event id" else chunk.end
        resumed[chunk.end] = producer.stream(attempt.job_id, after=after)
        is_behind = phase == "running" and chunk.end < 11
        late[chunk.end] = [next(resumed[chunk.end])] if is_behind else []
    second.finish(2)
    if phase == "expired":
        redis_client.delete(KEYS.token_log(attempt.job_id))
    for end, rest in resumed.items():
        assert_whole(late[end] + list(rest), 13, start=end)
    stream.close()


def test_an_expired_log_of_a_cancelled_job_is_gone(
    producer: Twin, mill: FakeMill, redis_client: redis.Redis
) -> None:
    attempt = submit(producer, mill)
    attempt.say()
    producer.cancel(attempt.job_id)
    redis_client.delete(KEYS.token_log(attempt.job_id))
    with pytest.raises(JobNotFound):
        list(producer.stream(attempt.job_id))


def test_a_synchronous_stream_that_is_dropped_gives_its_connection_back(
    redis_url: str, mill: FakeMill, redis_client: redis.Redis
) -> None:
    with Producer(redis_url) as producer:
        producer.submit([1])
        attempt = mill.claim()
        stream = producer.stream(attempt.job_id, timeout=0.05)
        with pytest.raises(JobNotFinished):
            next(stream)
        assert listeners(redis_client)
        del stream
        wait_until(lambda: not listeners(redis_client))
