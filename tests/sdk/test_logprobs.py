"""Logprobs reach whoever reads a result, stored or put together from the log."""

from tidemill import JobEnd, TokenLogprobs
from tidemill._await_result import ResultFollower
from tidemill._reads import LogEntry, LogPage, Outcome
from tidemill.protocol.codec import decode, encode
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.messages import JobResult, TokenChunk
from tidemill.protocol.states import JobState
from tidemill.result import Result, from_stored

FIRST = TokenLogprobs(logprob=-0.5, rank=2, top=((9, -0.25), (7, -0.5)), asked=((1, -9999.0),))
SECOND = TokenLogprobs(logprob=-1.5, rank=3)


def test_a_stored_result_has_logprobs_of_output_and_prompt() -> None:
    stored = JobResult(
        end=JobEnd(state="done"),
        ids=(7, 8),
        logprobs=(FIRST, SECOND),
        prompt_ids=(4, 5),
        prompt_logprobs=(None, SECOND),
    )
    result = from_stored("job", decode(encode(stored), JobResult))
    assert result.logprobs == (FIRST, SECOND)
    assert (result.prompt_ids, result.prompt_logprobs) == ((4, 5), (None, SECOND))


def result_from_log(*chunks: TokenChunk) -> Result:
    entries = [LogEntry(f"1-{chunk.end}", {b"d": encode(chunk)}) for chunk in chunks]
    entries.append(LogEntry("2-0", {b"e": encode(JobEnd(state="cancelled"))}))
    follower = ResultFollower(new_job_id())
    follower.take_reply(Outcome(JobState.CANCELLED, None))
    follower.take_reply(LogPage(JobState.CANCELLED, tuple(entries)))
    assert follower.result is not None
    return follower.result


def test_a_result_from_the_log_has_logprobs_of_the_output() -> None:
    told = result_from_log(
        TokenChunk(start=0, end=1, ids=(7,), logprobs=(FIRST,)),
        TokenChunk(start=1, end=2, ids=(8,), logprobs=(SECOND,)),
    )
    assert (told.token_ids, told.logprobs) == ((7, 8), (FIRST, SECOND))
    assert result_from_log(TokenChunk(start=0, end=1, ids=(7,))).logprobs is None
