"""The record of a job's output survives whatever happens to its log."""

from hypothesis import given
from hypothesis import strategies as st

from tidemill.protocol.codec import MAX_MESSAGE_BYTES, encode
from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.messages import JobEnd, TokenChunk
from tidemill_gpuworker.engine.scored_prompt import ScoredPrompt
from tidemill_gpuworker.shell.token_buffer import TokenBuffer

END = JobEnd(state="done", finish_reason="stop")


def _filled(*texts: str) -> TokenBuffer:
    buffer = TokenBuffer()
    for token, text in enumerate(texts):
        buffer.add([token], text)
    return buffer


def test_chunks_follow_each_other() -> None:
    buffer = _filled("a", "b", "c")
    first = buffer.next_chunk(2)
    assert first == TokenChunk(start=0, end=2, ids=(0, 1), text="ab")
    buffer.acknowledge(first.end)
    assert buffer.next_chunk(2) == TokenChunk(start=2, end=3, ids=(2,), text="c")
    assert buffer.num_pending == 1


def test_a_rewind_brings_back_what_the_log_lost() -> None:
    buffer = _filled("a", "b", "c", "d")
    for end in (1, 3):
        buffer.acknowledge(end)
    assert buffer.move_to(1)
    assert buffer.next_chunk(10) == TokenChunk(start=1, end=4, ids=(1, 2, 3), text="bcd")


def test_a_write_whose_reply_was_lost_is_skipped() -> None:
    buffer = _filled("a", "b", "c")
    assert buffer.move_to(2)
    assert buffer.next_chunk(10) == TokenChunk(start=2, end=3, ids=(2,), text="c")


def test_a_log_with_more_than_was_generated_is_not_ours() -> None:
    assert not _filled("a").move_to(2)


def test_entries_of_earlier_attempts_can_be_written_again() -> None:
    earlier = [
        TokenChunk(start=0, end=2, ids=(7, 8), text="hi"),
        TokenChunk(start=2, end=3, ids=(9,)),
    ]
    buffer = TokenBuffer(earlier)
    buffer.add([10], "x")
    assert (buffer.num_written, list(buffer.ids)) == (3, [7, 8, 9, 10])
    assert buffer.move_to(0)
    assert buffer.next_chunk(10) == TokenChunk(start=0, end=4, ids=(7, 8, 9, 10), text="hix")


def test_text_held_back_until_the_end_goes_with_the_last_chunk() -> None:
    buffer = _filled("a", "")
    buffer.acknowledge(2)
    buffer.add([], "held")
    last = buffer.next_chunk(10)
    assert last == TokenChunk(start=2, end=2, text="held")
    result = buffer.result(END, last)
    assert (result.text, result.entries) == ("aheld", ((2, 1), (2, 4)))


def test_text_without_tokens_in_mid_stream_comes_before_the_next_token() -> None:
    buffer = _filled("a")
    buffer.acknowledge(1)
    buffer.add([], "late ")
    buffer.add([5], "b")
    assert buffer.next_chunk(10).text == "late b"


@given(
    st.lists(st.text(max_size=3), min_size=1, max_size=20),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 20)), max_size=20),
)
def test_log_and_result_agree_after_any_losses(
    texts: list[str], moves: list[tuple[int, int]]
) -> None:
    """The log is kept as a list of entries; a failover cuts it at an entry, a reply gets lost."""
    buffer = _filled(*texts)
    log: list[TokenChunk] = []
    for size, kept in moves:
        chunk = buffer.next_chunk(size)
        if chunk.ids:
            log.append(chunk)
        if kept % 3 == 0:
            del log[kept % (len(log) + 1) :]
        if kept % 2 and chunk.ids and log and log[-1] is chunk:
            buffer.acknowledge(chunk.end)
        else:
            assert buffer.move_to(log[-1].end if log else 0)
    last = buffer.next_chunk(100)
    result = buffer.result(END, last)
    entries = [*log, last] if last.ids else log
    assert [token for entry in entries for token in entry.ids] == list(range(len(texts)))
    assert "".join(entry.text for entry in entries) == result.text == "".join(texts)
    assert result.entries == tuple((entry.end, len(entry.text)) for entry in entries)


def _logprobs(*values: float, num_top: int = 0) -> tuple[TokenLogprobs, ...]:
    top = tuple((2**31 - 1 - place, -1e-3) for place in range(num_top))
    return tuple(TokenLogprobs(logprob=value, rank=1, top=top) for value in values)


def test_logprobs_go_with_their_tokens_also_those_of_an_earlier_attempt() -> None:
    earlier = TokenChunk(start=0, end=2, ids=(7, 8), text="hi", logprobs=_logprobs(-0.7, -0.8))
    buffer = TokenBuffer([earlier])
    buffer.add([9, 10], "x", _logprobs(-0.9, -1.0))
    last = buffer.next_chunk(10)
    assert last.logprobs == _logprobs(-0.9, -1.0)
    prompt = ScoredPrompt((3, 4), (None, *_logprobs(-2.0)))
    result = buffer.result(END, last, prompt)
    assert result.logprobs == _logprobs(-0.7, -0.8, -0.9, -1.0)
    assert (result.prompt_ids, result.prompt_logprobs) == (prompt.ids, prompt.logprobs)
    assert buffer.move_to(0)
    assert buffer.next_chunk(3).logprobs == _logprobs(-0.7, -0.8, -0.9)


def test_without_logprobs_there_are_none_in_chunk_and_result() -> None:
    buffer = _filled("a", "b")
    last = buffer.next_chunk(2)
    assert last.logprobs is None and buffer.result(END, last).logprobs is None


def test_a_backlog_with_many_logprobs_is_cut_into_messages_that_fit() -> None:
    buffer = TokenBuffer()
    for token in range(200):
        buffer.add([token], "", _logprobs(-1.0, num_top=1000))
    num_told = 0
    while buffer.num_pending:
        chunk = buffer.next_chunk(4096)
        assert len(encode(chunk)) < MAX_MESSAGE_BYTES / 2
        assert chunk.end > chunk.start == num_told
        buffer.acknowledge(chunk.end)
        num_told = chunk.end
    assert num_told == 200
    # A token that takes a message of its own gets one.
    buffer.add([200, 201], "", _logprobs(-1.0, -2.0, num_top=50_000))
    assert len(buffer.next_chunk(10).ids) == 1
    assert len(encode(buffer.next_chunk(10))) < MAX_MESSAGE_BYTES
