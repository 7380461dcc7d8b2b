"""The pure part of a stream: any mix of late, repeated and lost messages gives the log."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill._follow import Chunk, TokenFollower, stored_chunks
from tidemill._reads import PAGE_SIZE, SEAL, LogEntry, LogPage, Outcome
from tidemill.protocol.codec import encode
from tidemill.protocol.errors import InvalidRequest, JobNotFound, StreamGap
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.messages import JobEnd, JobResult, TokenChunk
from tidemill.protocol.states import JobState

END = JobEnd(state="done", finish_reason="stop")


@dataclass
class Script:
    """A finished job: its log entries, the message each was published as, and its result."""

    entries: list[LogEntry]
    messages: list[bytes]
    chunks: list[TokenChunk]
    result: JobResult


def text_of(position: int, length: int) -> str:
    return chr(ord("a") + position % 26) * length


def write_log(sizes: list[int], fences: list[bool], lengths: list[int], tail: str) -> Script:
    """Entries of the given numbers of tokens; a true fence starts a new attempt before one.

    Token ``i`` has ``lengths[i % len(lengths)]`` characters.
    """
    entries, messages, chunks = [LogEntry("1-0", {b"c": b"wkr"})], [], []
    fence, position = 1, 0
    for size, crashed in zip(sizes, fences, strict=True):
        if crashed:
            fence += 1
            entries.append(LogEntry(f"{fence}-{position}", {b"c": b"wkr"}))
        chunk = make_chunk(position, position + size, lengths)
        position += size
        chunks.append(chunk)
        entry_id, data = f"{fence}-{position}", encode(chunk)
        entries.append(LogEntry(entry_id, {b"s": b"%d" % chunk.start, b"d": data}))
        messages.append(entry_id.encode() + b" " + data)
    seal = {b"s": b"%d" % position, b"e": encode(END)}
    if tail:
        chunks.append(TokenChunk(start=position, end=position, text=tail))
        seal[b"d"] = encode(chunks[-1])
    entries.append(LogEntry(f"{SEAL}-{position}", seal))
    messages.append(f"{SEAL}-{position} ".encode())
    text = "".join(chunk.text for chunk in chunks)
    boundaries = tuple((chunk.end, len(chunk.text)) for chunk in chunks)
    result = JobResult(
        end=END,
        ids=tuple(range(position)),
        text=text,
        entries=boundaries,
        logprobs=logprobs_of(0, position) or None,
    )
    return Script(entries, messages, chunks, result)


def make_chunk(start: int, end: int, lengths: list[int]) -> TokenChunk:
    text = "".join(text_of(i, lengths[i % len(lengths)]) for i in range(start, end))
    ids = tuple(range(start, end))
    return TokenChunk(start=start, end=end, ids=ids, text=text, logprobs=logprobs_of(start, end))


def logprobs_of(start: int, end: int) -> tuple[TokenLogprobs, ...]:
    """Each token's logprob is its position, negated."""
    return tuple(TokenLogprobs(logprob=-float(i), rank=1) for i in range(start, end))


def key_of(entry_id: str) -> tuple[int, int]:
    fence, _, position = entry_id.partition("-")
    return int(fence), int(position)


def read(follower: TokenFollower, entries: list[LogEntry], state: JobState) -> None:
    """Answer the follower's next read from a log that holds ``entries``."""
    command: Any = follower.next_read().commands[-1]
    start = command[2]
    later = [
        entry
        for entry in entries
        if start == "-" or key_of(entry.entry_id) > key_of(start.removeprefix("("))
    ]
    follower.take_reply(LogPage(state, tuple(later[:PAGE_SIZE])))


def drain(follower: TokenFollower) -> list[Chunk]:
    chunks = list(follower.ready)
    follower.ready.clear()
    return chunks


def finish_reading(follower: TokenFollower, script: Script) -> list[Chunk]:
    """Look until the end, as a reader's ticks would make it do."""
    chunks: list[Chunk] = []
    for _ in range(4):
        if not follower.is_done:
            follower.must_read = True
            read(follower, script.entries, JobState.DONE)
        chunks += drain(follower)
    assert follower.is_done
    return chunks


def assert_told(chunks: list[Chunk], script: Script, start: int = 0) -> None:
    """Every token and character from ``start`` on came once and in order."""
    ids = [token for chunk in chunks for token in chunk.ids]
    assert ids == list(range(start, len(script.result.ids)))
    logprobs = [each for chunk in chunks for each in chunk.logprobs or ()]
    assert tuple(logprobs) == logprobs_of(start, len(script.result.ids))
    before = "".join(chunk.text for chunk in script.chunks if chunk.end <= start and chunk.ids)
    assert before + "".join(chunk.text for chunk in chunks) == script.result.text
    for earlier, later in pairwise(chunks):
        assert earlier.end == later.start


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    sizes = draw(st.lists(st.integers(1, 4), min_size=0, max_size=12))
    fences = [draw(st.integers(0, 4)) == 0 for _ in sizes]
    lengths = draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    return write_log(sizes, fences, lengths, draw(st.sampled_from(["", "end", "."])))


@settings(deadline=None, max_examples=300)
@given(scripts(), st.data())
def test_lost_repeated_and_reordered_messages_change_nothing(
    script: Script, data: st.DataObject
) -> None:
    boundaries = [0, *(chunk.end for chunk in script.chunks if chunk.ids)]
    start = data.draw(st.sampled_from(boundaries))
    follower = TokenFollower(new_job_id(), start)
    told: list[Chunk] = []
    published = 0
    for _ in range(data.draw(st.integers(0, 30))):
        published = data.draw(st.integers(published, len(script.messages)))
        if follower.is_done:
            break
        if data.draw(st.booleans()) and published:
            # Pub/sub may deliver anything that was published, at any time, any number of times.
            follower.take_message(script.messages[data.draw(st.integers(0, published - 1))])
        elif follower.must_read:
            read(follower, *visible(script, published))
        told += drain(follower)
    told += finish_reading(follower, script)
    assert_told(told, script, start)


def visible(script: Script, published: int) -> tuple[list[LogEntry], JobState]:
    """Return the log once so many of its entries with a message were written."""
    if published == len(script.messages):
        return script.entries, JobState.DONE
    entries: list[LogEntry] = []
    for entry in script.entries:
        if b"c" not in entry.fields:
            published -= 1
        if published < 0:
            break
        entries.append(entry)
    return entries, JobState.RUNNING


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=8),
    st.lists(st.integers(1, 4), min_size=1, max_size=16),
    st.integers(0, 8),
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
)
def test_a_log_rewritten_with_other_boundaries_is_cut_where_the_reader_was(
    first: list[int], second: list[int], num_seen: int, lengths: list[int]
) -> None:
    # A server that loses acknowledged writes gets the same tokens again, split differently.
    total = max(sum(first), sum(second))
    sizes = [[*second, total - sum(second)], [*first, total - sum(first)]]
    old, new = ([size for size in each if size] for each in sizes)
    before = write_log(new, [False] * len(new), lengths, "")
    after = write_log(old, [True] * len(old), lengths, "!")
    follower = TokenFollower(new_job_id())
    read(follower, before.entries[: 1 + min(num_seen, len(new))], JobState.RUNNING)
    told = drain(follower)
    told += finish_reading(follower, after)
    assert_told(told, after)


def test_a_message_of_the_next_tokens_is_given_out_without_a_look_at_the_log() -> None:
    script = write_log([1, 2], [False, False], [1], "")
    follower = TokenFollower(new_job_id())
    read(follower, [], JobState.QUEUED)
    follower.take_message(script.messages[0])
    follower.take_message(script.messages[1])
    assert [chunk.ids for chunk in drain(follower)] == [(0,), (1, 2)]
    assert not follower.must_read


def test_a_message_that_was_told_already_is_not_looked_up() -> None:
    script = write_log([1, 2], [False, False], [1], "")
    follower = TokenFollower(new_job_id())
    read(follower, script.entries[:3], JobState.RUNNING)
    follower.take_message(script.messages[0])
    follower.take_message(script.messages[1])
    assert not follower.must_read
    assert len(drain(follower)) == 2


def test_a_full_page_of_the_log_calls_for_the_next_one() -> None:
    script = write_log([1] * PAGE_SIZE, [False] * PAGE_SIZE, [1], "")
    follower = TokenFollower(new_job_id())
    read(follower, script.entries[:PAGE_SIZE], JobState.RUNNING)
    assert follower.must_read
    read(follower, script.entries, JobState.DONE)
    assert not follower.must_read
    assert_told(drain(follower), script)


def test_a_message_that_is_no_message_causes_a_look_at_the_log() -> None:
    for junk in (b"", b"x", b"1-1 \x01\xff", b"1-1 \x07abc", b"\xff\xff "):
        follower = TokenFollower(new_job_id())
        read(follower, [], JobState.QUEUED)
        assert not follower.must_read
        follower.take_message(junk)
        assert follower.must_read
        assert not follower.ready


def test_a_log_that_lacks_tokens_is_an_error_only_if_it_really_does() -> None:
    script = write_log([2, 2, 2], [False] * 3, [1], "")
    follower = TokenFollower(new_job_id())
    read(follower, script.entries[:2], JobState.RUNNING)
    torn = [*script.entries[:2], *script.entries[3:]]
    read(follower, torn, JobState.DONE)
    assert follower.must_read, "a gap behind the cursor calls for a scan first"
    with pytest.raises(StreamGap, match="lacks the tokens 2 to 4"):
        read(follower, torn, JobState.DONE)


def test_resuming_by_event_id_reads_only_what_follows() -> None:
    script = write_log([2, 2], [False, True], [1], "")
    follower = TokenFollower(new_job_id(), "1-2")
    command: Any = follower.next_read().commands[-1]
    assert command[2] == "(1-2"
    read(follower, script.entries, JobState.DONE)
    assert [chunk.ids for chunk in drain(follower)] == [(2, 3)]


def test_an_event_id_of_a_lost_attempt_still_resumes() -> None:
    script = write_log([2, 2], [False, False], [1], "")
    follower = TokenFollower(new_job_id(), "7-2")
    chunks = finish_reading(follower, script)
    assert_told(chunks, script, 2)


def test_a_position_beyond_the_output_yields_nothing() -> None:
    script = write_log([2], [False], [1], "!")
    follower = TokenFollower(new_job_id(), 5)
    assert finish_reading(follower, script) == []


@given(scripts(), st.data())
def test_a_result_is_cut_as_its_log_was(script: Script, data: st.DataObject) -> None:
    live = [(chunk.start, chunk.end, chunk.ids, chunk.text) for chunk in script.chunks]
    late = list(stored_chunks(script.result))
    assert [(c.start, c.end, c.ids, c.text) for c in late if c.ids or c.text] == live
    start = data.draw(st.sampled_from([0, *(chunk.end for chunk in script.chunks)]))
    follower = TokenFollower(new_job_id(), start)
    read(follower, [], JobState.DONE)
    follower.take_reply(Outcome(JobState.DONE, script.result))
    assert_told(drain(follower), script, start)


def test_a_result_without_boundaries_is_one_chunk() -> None:
    result = JobResult(end=END, ids=(5, 6), text="ab")
    assert list(stored_chunks(result)) == [Chunk(0, 2, (5, 6), "ab", f"{SEAL}-2")]


def test_a_position_inside_a_stored_chunk_is_refused() -> None:
    script = write_log([4], [False], [1], "")
    follower = TokenFollower(new_job_id(), 2)
    read(follower, [], JobState.DONE)
    with pytest.raises(InvalidRequest, match="inside the chunk 0-4"):
        follower.take_reply(Outcome(JobState.DONE, script.result))


def test_a_job_that_vanishes_is_not_found() -> None:
    follower = TokenFollower(new_job_id())
    with pytest.raises(JobNotFound):
        follower.take_reply(LogPage(None, ()))
