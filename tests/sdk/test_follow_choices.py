"""A stream of several choices gives out each of them once, in whatever order the log tells them."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill._follow import Chunk, TokenFollower
from tidemill._reads import SEAL, LogEntry, LogPage, Outcome
from tidemill.protocol.codec import encode
from tidemill.protocol.errors import StreamGap
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.messages import ChoiceEnd, ChoiceOutput, JobEnd, JobResult, TokenChunk
from tidemill.protocol.states import JobState

#: Choice -> (token, its text), the same in every attempt.
OUTPUTS = [
    [(100 * choice + place, chr(97 + place) * (place % 3)) for place in range(6)]
    for choice in range(3)
]
END = JobEnd(state="done", finish_reason="stop", choices=(ChoiceEnd(),) * 3)

Log = list[TokenChunk]


@st.composite
def logs(draw: st.DrawFn) -> Log:
    """One way to tell all outputs."""
    left = [list(output) for output in OUTPUTS]
    chunks: Log = []
    while any(left):
        choice = draw(st.sampled_from([c for c, tokens in enumerate(left) if tokens]))
        size = draw(st.integers(1, 3))
        told, left[choice] = left[choice][:size], left[choice][size:]
        start = chunks[-1].end if chunks else 0
        chunks.append(
            TokenChunk(
                start=start,
                end=start + len(told),
                ids=tuple(token for token, _ in told),
                text="".join(text for _, text in told),
                choice=choice,
            )
        )
    return chunks


def entries_of(log: Log, fence: int) -> list[LogEntry]:
    return [
        LogEntry(f"{fence}-{chunk.end}", {b"s": b"%d" % chunk.start, b"d": encode(chunk)})
        for chunk in log
    ]


def message_of(entry: LogEntry) -> bytes:
    return entry.entry_id.encode() + b" " + entry.fields[b"d"]


def read(follower: TokenFollower, entries: list[LogEntry], state: JobState) -> None:
    """Answer what the follower asks for until it wants no more."""
    while follower.must_read:
        cursor = follower.next_read().commands[1][2]
        assert isinstance(cursor, str)
        after = _key(cursor[1:]) if cursor.startswith("(") else (0, -1)
        page = [entry for entry in entries if _key(entry.entry_id) > after]
        follower.take_reply(LogPage(state, tuple(page)))


def _key(entry_id: str) -> tuple[int, int]:
    fence, _, position = entry_id.partition("-")
    return int(fence), int(position)


def ended(log: Log, fence: int) -> list[LogEntry]:
    position = log[-1].end
    seal = {b"s": b"%d" % position, b"e": encode(END)}
    return [*entries_of(log, fence), LogEntry(f"{SEAL}-{position}", seal)]


def assert_whole(chunks: list[Chunk]) -> None:
    for choice, output in enumerate(OUTPUTS):
        own = [chunk for chunk in chunks if chunk.choice == choice]
        assert [token for chunk in own for token in chunk.ids] == [token for token, _ in output]
        assert "".join(chunk.text for chunk in own) == "".join(text for _, text in output)
    assert all(left.end == right.start for left, right in pairwise(chunks))
    assert chunks[0].start == 0


@settings(max_examples=60, deadline=None)
@given(logs(), st.data())
def test_lost_and_repeated_messages_change_nothing(log: Log, data: st.DataObject) -> None:
    follower = TokenFollower(new_job_id())
    entries = entries_of(log, 1)
    read(follower, [], JobState.RUNNING)
    for number, entry in enumerate(entries, start=1):
        for _ in range(data.draw(st.integers(0, 2))):
            follower.take_message(message_of(entry))
            read(follower, entries[:number], JobState.RUNNING)
    follower.must_read = True
    read(follower, ended(log, 1), JobState.DONE)
    assert_whole(list(follower.ready))


@settings(max_examples=100, deadline=None)
@given(logs(), logs(), st.data())
def test_a_job_computed_again_in_another_order_is_told_once(
    first: Log, second: Log, data: st.DataObject
) -> None:
    follower = TokenFollower(new_job_id())
    seen = entries_of(first, 1)[: data.draw(st.integers(0, len(first)))]
    read(follower, seen, JobState.RUNNING)
    entries = entries_of(second, 2)
    if data.draw(st.booleans()):
        follower.start_over()
    for number, entry in enumerate(entries, start=1):
        if data.draw(st.booleans()):
            follower.take_message(message_of(entry))
            read(follower, entries[:number], JobState.RUNNING)
    follower.must_read = True
    read(follower, ended(second, 2), JobState.DONE)
    assert follower.is_done
    assert_whole(list(follower.ready))


@settings(max_examples=30, deadline=None)
@given(logs(), st.data())
def test_an_expired_log_goes_on_from_the_result(log: Log, data: st.DataObject) -> None:
    follower = TokenFollower(new_job_id())
    read(follower, entries_of(log, 1)[: data.draw(st.integers(0, len(log)))], JobState.RUNNING)
    first, *others = [
        ChoiceOutput(
            ids=tuple(token for token, _ in output), text="".join(text for _, text in output)
        )
        for output in OUTPUTS
    ]
    stored = JobResult(
        end=END,
        ids=first.ids,
        text=first.text,
        others=tuple(others),
        entries=tuple((chunk.end, len(chunk.text)) for chunk in log),
        entry_choices=tuple(chunk.choice for chunk in log),
    )
    follower.must_read = True
    follower.take_reply(LogPage(JobState.DONE, ()))
    follower.take_reply(Outcome(JobState.DONE, stored))
    assert_whole(list(follower.ready))


@given(logs(), st.data())
def test_a_stream_resumes_after_each_chunk(log: Log, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(log) - 1))
    for after in (log[place].end, f"1-{log[place].end}"):
        follower = TokenFollower(new_job_id(), after)
        read(follower, ended(log, 1), JobState.DONE)
        told = [(chunk.start, chunk.ids, chunk.choice) for chunk in follower.ready]
        assert told == [(chunk.start, chunk.ids, chunk.choice) for chunk in log[place + 1 :]]


def test_a_log_that_lacks_tokens_is_an_error() -> None:
    log = [
        TokenChunk(start=0, end=1, ids=(1,), choice=1),
        TokenChunk(start=2, end=3, ids=(3,), choice=0),
    ]
    follower = TokenFollower(new_job_id())
    with pytest.raises(StreamGap, match="goes on with token 2 after token 1"):
        read(follower, entries_of(log, 1), JobState.RUNNING)
