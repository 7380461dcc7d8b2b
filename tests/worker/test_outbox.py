"""When tokens are written, and what the server's replies do to them."""

from collections import Counter

import redis

from tidemill.protocol.calls import JobRef, Written
from tidemill.protocol.errors import QueueFull
from tidemill.protocol.messages import JobEnd, TokenChunk
from tidemill_gpuworker.shell.alarm import NEVER
from tidemill_gpuworker.shell.jobs import Job
from tidemill_gpuworker.shell.outbox import MAX_CHUNK_TOKENS, Outbox, PublishPolicy, Update

ACCEPTED = Written(accepted=True, owned=True)
LOST = Written(accepted=False, owned=False, state="run")
DONE = JobEnd(state="done", finish_reason="stop")
POLICY = PublishPolicy(
    stream_seconds=4.0,
    quiet_seconds=50.0,
    slack_seconds=1.0,
    retry_seconds=9.0,
    max_retry_seconds=30.0,
)


def _job(name: str = "a", *, stream: bool = True, fence: int = 1) -> Job:
    return Job(JobRef(name, "p1:default"), fence, stream=stream)


def _outbox(*jobs: Job) -> Outbox:
    outbox = Outbox(POLICY)
    for job in jobs:
        outbox.open(job, ())
    return outbox


def _send(outbox: Outbox, now: float) -> list[TokenChunk]:
    writes = outbox.select(now)
    outbox.apply(writes, [ACCEPTED] * len(writes), now)
    return [write.chunk for write in writes]


def test_the_first_token_is_due_at_once_and_later_ones_after_an_interval() -> None:
    outbox = _outbox(_job("a"), _job("b", stream=False))
    for name in "ab":
        outbox.add(Update(name, [1], "x"), 100.0)
    assert outbox.next_due == 100.0
    assert len(_send(outbox, 100.0)) == 2
    assert outbox.next_due == NEVER
    for name in "ab":
        outbox.add(Update(name, [2], "y"), 101.0)
    assert outbox.next_due == 104.0
    assert [chunk.ids for chunk in _send(outbox, 104.0)] == [(2,)]
    assert outbox.next_due == 150.0


def test_many_live_jobs_write_less_often() -> None:
    outbox = Outbox(PublishPolicy(stream_seconds=4.0, max_chunks_per_second=2.0))
    names = [f"job-{number}" for number in range(20)]
    for name in names:
        outbox.open(_job(name), ())
        outbox.add(Update(name, [1]), 0.0)
    assert len(_send(outbox, 0.0)) == 20
    for name in names:
        outbox.add(Update(name, [2]), 1.0)
    assert outbox.next_due == 20 / 2.0


def test_tokens_that_waited_longer_than_the_interval_are_due_at_once() -> None:
    outbox = _outbox(_job())
    outbox.add(Update("a", [1]), 0.0)
    _send(outbox, 0.0)
    outbox.add(Update("a", [2]), 70.0)
    assert outbox.next_due == 70.0


def test_an_end_is_due_at_once_and_takes_the_last_tokens_along() -> None:
    outbox = _outbox(_job())
    outbox.add(Update("a", [1]), 0.0)
    _send(outbox, 0.0)
    outbox.add(Update("a", [2], "z", DONE), 1.0)
    (write,) = outbox.select(1.0)
    assert (write.chunk.ids, write.chunk.text, write.end) == ((2,), "z", DONE)
    outcome = outbox.apply([write], [ACCEPTED], 1.0)
    assert outcome.ended == (_job(),)
    assert (outbox.next_due, outbox.num_unpublished) == (NEVER, 0)


def test_an_end_whose_first_reply_was_lost_is_not_a_lost_job() -> None:
    outbox = _outbox(_job())
    outbox.add(Update("a", [1], "", DONE), 0.0)
    outcome = outbox.apply(
        outbox.select(0.0), [Written(accepted=False, owned=False, state="done")], 0.0
    )
    assert (outcome.ended, outcome.lost) == ((_job(),), ())


def test_a_job_that_is_not_ours_is_lost_with_its_tokens() -> None:
    outbox = _outbox(_job())
    outbox.add(Update("a", [1, 2]), 0.0)
    assert outbox.apply(outbox.select(0.0), [LOST], 0.0).lost == (_job(),)
    assert outbox.num_unpublished == 0
    outbox.add(Update("a", [3]), 1.0)
    assert outbox.next_due == NEVER


def test_an_error_of_the_server_is_tried_again_later_and_later() -> None:
    outbox = _outbox(_job())
    outbox.add(Update("a", [1]), 0.0)
    failures: list[tuple[Written | Exception, float]] = [
        (Written(accepted=False, owned=True), 109.0),
        (QueueFull("no memory", retry_after_seconds=1), 118.0),
        (redis.ResponseError("WRONGTYPE"), 130.0),
    ]
    for reply, due in failures:
        outcome = outbox.apply(outbox.select(NEVER), [reply], 100.0)
        assert outcome.num_repaired == 1
        assert outbox.next_due == due
    assert [chunk.ids for chunk in _send(outbox, 130.0)] == [(1,)]
    outbox.add(Update("a", [2]), 200.0)
    outbox.apply(outbox.select(NEVER), [Written(accepted=False, owned=True)], 200.0)
    assert outbox.next_due == 209.0


def test_a_log_that_lost_its_tail_gets_it_again() -> None:
    outbox = _outbox(_job())
    for token in (1, 2, 3):
        outbox.add(Update("a", [token]), float(token * 10))
        _send(outbox, token * 10.0)
    outbox.add(Update("a", [4]), 40.0)
    outbox.apply(outbox.select(40.0), [Written(accepted=False, owned=True, num_tokens=1)], 40.0)
    assert outbox.num_unpublished == 3
    assert _send(outbox, 40.0) == [TokenChunk(start=1, end=4, ids=(2, 3, 4))]
    assert outbox.num_unpublished == 0


def test_tokens_that_arrive_while_a_write_is_under_way_are_kept() -> None:
    outbox = _outbox(_job())
    outbox.add(Update("a", [1]), 0.0)
    writes = outbox.select(0.0)
    outbox.add(Update("a", [2]), 0.5)
    outbox.apply(writes, [ACCEPTED], 1.0)
    assert (outbox.num_unpublished, outbox.next_due) == (1, 5.0)


def test_a_reply_to_an_older_attempt_changes_nothing() -> None:
    outbox = _outbox(_job(fence=1))
    outbox.add(Update("a", [1]), 0.0)
    writes = outbox.select(0.0)
    outbox.open(_job(fence=2), ())
    outcome = outbox.apply(writes, [LOST], 0.0)
    assert outcome.lost == ()
    outbox.add(Update("a", [7]), 1.0)
    assert [chunk.ids for chunk in _send(outbox, 1.0)] == [(7,)]


def test_a_closed_job_is_written_at_once_and_told_when_nothing_is_left() -> None:
    outbox, told = _outbox(_job(stream=False)), list[str]()
    outbox.add(Update("a", [1]), 0.0)
    _send(outbox, 0.0)
    outbox.add(Update("a", [2]), 1.0)
    assert not outbox.close(_job(stream=False), lambda: told.append("a"), 1.0)
    assert outbox.next_due == 1.0
    outcome = outbox.apply(outbox.select(1.0), [ACCEPTED], 1.0)
    for then in outcome.then:
        then()
    assert (told, outcome.ended, outcome.lost) == (["a"], (), ())
    assert outbox.generated(_job(stream=False)) is None


def test_a_closed_job_waits_for_tokens_that_the_log_has_lost() -> None:
    outbox = _outbox(_job())
    for token in (1, 2):
        outbox.add(Update("a", [token]), float(token * 10))
        _send(outbox, token * 10.0)
    outbox.add(Update("a", [3]), 30.0)
    assert not outbox.close(_job(), lambda: None, 30.0)
    rewound = Written(accepted=False, owned=True, num_tokens=1)
    assert outbox.apply(outbox.select(30.0), [rewound], 30.0).then == ()
    (write,) = outbox.select(30.0)
    assert write.chunk.ids == (2, 3)
    assert len(outbox.apply([write], [ACCEPTED], 30.0).then) == 1


def test_a_closed_job_that_is_lost_is_told_to_nobody() -> None:
    outbox = _outbox(_job())
    outbox.add(Update("a", [1]), 0.0)
    assert not outbox.close(_job(), lambda: None, 0.0)
    outcome = outbox.apply(outbox.select(0.0), [LOST], 0.0)
    assert (outcome.then, outcome.lost) == ((), (_job(),))


def test_a_job_that_is_not_open_is_not_closed() -> None:
    outbox = _outbox(_job(fence=2))
    assert not outbox.close(_job(fence=1), lambda: None, 0.0)
    assert outbox.generated(_job(fence=2)) is not None
    assert outbox.close(_job(fence=2), lambda: None, 0.0)


def test_a_failure_ends_behind_a_log_that_nobody_can_read() -> None:
    outbox = _outbox(_job())
    failed = JobEnd(state="failed", finish_reason="error", error="the log breaks off")
    outbox.add(Update("a", end=failed), 0.0)
    longer = Written(accepted=False, owned=True, num_tokens=5)
    assert outbox.apply(outbox.select(0.0), [longer], 0.0).lost == ()
    (write,) = outbox.select(0.0)
    assert (write.chunk, write.end) == (TokenChunk(start=5, end=5), failed)
    assert outbox.apply([write], [ACCEPTED], 0.0).ended == (_job(),)


def test_any_other_end_of_a_log_that_is_too_long_is_lost() -> None:
    outbox = _outbox(_job())
    outbox.add(Update("a", [1], "", DONE), 0.0)
    longer = Written(accepted=False, owned=True, num_tokens=5)
    assert outbox.apply(outbox.select(0.0), [longer], 0.0).lost == (_job(),)


def test_a_long_backlog_is_written_in_pieces_before_the_end() -> None:
    outbox = _outbox(_job())
    ids = list(range(MAX_CHUNK_TOKENS + 5))
    outbox.add(Update("a", ids, "t", DONE), 0.0)
    first = _send(outbox, 0.0)
    assert [len(chunk.ids) for chunk in first] == [MAX_CHUNK_TOKENS]
    (write,) = outbox.select(0.0)
    assert (len(write.chunk.ids), write.end) == (5, DONE)


def test_a_worker_of_more_than_256_jobs_starves_none_of_them() -> None:
    jobs = [_job(f"j{i}") for i in range(300)]
    outbox = _outbox(*jobs)
    num_writes = Counter[str]()
    for step in range(20):
        # A step is longer than the interval, so that all jobs are due whenever a flush begins.
        now = step * (POLICY.stream_seconds + 1.0)
        for job in jobs:
            outbox.add(Update(job.job_id, [1]), now)
        writes = outbox.select(now)
        num_writes.update(write.item.job.job_id for write in writes)
        outbox.apply(writes, [ACCEPTED] * len(writes), now)
    assert len(num_writes) == 300
    # Whoever is left out of one flush is the first in the next one.
    assert min(num_writes.values()) >= 10


def test_one_flush_takes_256_jobs_at_most() -> None:
    jobs = [_job(f"j{i}") for i in range(300)]
    outbox = _outbox(*jobs)
    for job in jobs:
        outbox.add(Update(job.job_id, [1]), 0.0)
    assert len(_send(outbox, 0.0)) == 256
    assert outbox.next_due == 0.0
    assert len(_send(outbox, 0.0)) == 44
