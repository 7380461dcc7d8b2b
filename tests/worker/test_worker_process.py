"""The real worker process: start, kill, take over, bad settings."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis

from support import shard
from support.shard import KEYS
from support.tiny_chat_model import save_tiny_chat_model
from support.wait import wait_until
from support.worker_rig import result_of, state_of, submit
from tidemill.cli.child import ERROR_PREFIX
from tidemill.protocol.codec import decode
from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.messages import (
    ChatMessage,
    GenerateRequest,
    JobResult,
    ModelCard,
    TokenChunk,
)
from tidemill.protocol.sampling import SamplingParams
from tidemill.service.tokenizer import Tokenizer

NUM_TOKENS = 48
OPTIONS = ("--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "256")


@contextmanager
def worker(
    url: str, model_dir: Path, options: Sequence[str] = OPTIONS
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A worker process that serves ``smol`` and its id."""
    environment = os.environ | {"TIDEMILL_LEASE_SECONDS": "1.5", "TIDEMILL_BEAT_SECONDS": "0.3"}
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "tidemill_gpuworker", "--redis-url", url]
    command += ["--model", str(model_dir), "--served-model-name", "smol", "--num-threads", "1"]
    command += ["--ready-fd", str(write_end), *options]
    with subprocess.Popen(command, env=environment, pass_fds=(write_end,)) as process:
        os.close(write_end)
        try:
            with os.fdopen(read_end) as ready:
                yield process, ready.readline().strip()
        finally:
            process.kill()


def _requests() -> list[GenerateRequest]:
    chat = (ChatMessage(role="user", content="Tell me how a tide mill works."),)
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    sampled = SamplingParams(
        temperature=0.9, top_p=0.95, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True
    )
    unseeded = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    told = SamplingParams(
        temperature=0.0,
        repetition_penalty=1.2,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        logit_bias=((260, -2.0),),
        bad_words=("mill",),
        logprobs=3,
        prompt_logprobs=2,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
    )
    return [
        GenerateRequest(model="smol", prompt="The tide mill is a mill that", params=told),
        GenerateRequest(model="smol", messages=chat, params=greedy),
        GenerateRequest(model="smol", prompt="The water wheel", params=sampled),
        GenerateRequest(model="smol", prompt="Once upon a tide", params=unseeded),
    ]


def _run(client: redis.Redis, epoch: int, worker_id: str, job_id: str) -> None:
    fence = shard.dispatch(client, job_id, epoch, worker=worker_id, lease_ms=1_500).fence
    assert fence > 0


def _chunks(client: redis.Redis, job_id: str) -> list[TokenChunk]:
    log = client.xrange(KEYS.token_log(job_id))
    return [decode(fields[b"d"], TokenChunk) for _, fields in log if b"d" in fields]


@pytest.mark.model
def test_streams_go_on_without_a_gap_when_their_worker_is_killed(
    redis_client: redis.Redis, redis_url: str, demo_model_dir: Path, epoch: int
) -> None:
    with ExitStack() as stack:
        first, first_id = stack.enter_context(worker(redis_url, demo_model_dir))
        _, second_id = stack.enter_context(worker(redis_url, demo_model_dir))
        jobs = [submit(redis_client, request) for request in _requests()]
        for job_id in jobs:
            _run(redis_client, epoch, first_id, job_id)
        wait_until(lambda: all(_chunks(redis_client, job_id) for job_id in jobs), timeout=60)
        first.send_signal(signal.SIGKILL)
        first.wait()
        cut_at = [_chunks(redis_client, job_id)[-1].end for job_id in jobs]
        assert all(0 < end < NUM_TOKENS for end in cut_at)
        for job_id in jobs:
            wait_until(lambda job_id=job_id: shard.reap(redis_client, job_id) == 1)  # type: ignore[misc]
            _run(redis_client, epoch, second_id, job_id)
        for job_id in jobs:
            wait_until(
                lambda job_id=job_id: state_of(redis_client, job_id) == "done",  # type: ignore[misc]
                timeout=60,
            )
        # The same work once more, with nobody being killed; the first three need no seed.
        again = [submit(redis_client, request) for request in _requests()[:3]]
        for job_id in again:
            _run(redis_client, epoch, second_id, job_id)
        for job_id in again:
            wait_until(
                lambda job_id=job_id: state_of(redis_client, job_id) == "done",  # type: ignore[misc]
                timeout=60,
            )
    tokenizer = Tokenizer.from_directory(demo_model_dir)
    for job_id in jobs:
        result, chunks = result_of(redis_client, job_id), _chunks(redis_client, job_id)
        assert [chunk.start for chunk in chunks] == [0, *(chunk.end for chunk in chunks[:-1])]
        assert [token for chunk in chunks for token in chunk.ids] == list(result.ids)
        assert "".join(chunk.text for chunk in chunks) == result.text
        assert tokenizer.decode(result.ids) == result.text
        assert len(result.ids) == NUM_TOKENS
    for interrupted, whole in zip(jobs, again, strict=False):
        assert result_of(redis_client, interrupted).ids == result_of(redis_client, whole).ids
    chunks = _chunks(redis_client, jobs[0])
    _check_told(result_of(redis_client, jobs[0]), result_of(redis_client, again[0]), chunks)


def _check_told(ours: JobResult, whole: JobResult, chunks: list[TokenChunk]) -> None:
    """Logprobs are the same in log and result, and those of a job that nobody interrupted."""
    assert ours.logprobs is not None and whole.logprobs is not None
    assert tuple(each for chunk in chunks for each in chunk.logprobs or ()) == ours.logprobs
    assert "mill" not in ours.text
    assert ours.prompt_ids == whole.prompt_ids
    assert len(ours.prompt_logprobs or ()) == len(ours.prompt_ids) > 4
    for told, wanted in (
        (ours.logprobs, whole.logprobs),
        (ours.prompt_logprobs, whole.prompt_logprobs),
    ):
        assert _values(told or ()) == pytest.approx(_values(wanted or ()), abs=1e-4)


def _values(told: Sequence[TokenLogprobs | None]) -> list[float]:
    return [n for each in told if each for n in (each.logprob, *(value for _, value in each.top))]


def test_a_worker_registers_what_producers_need(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    with worker(redis_url, save_tiny_chat_model(tmp_path)) as (process, worker_id):
        card = decode(redis_client.hget(KEYS.model("smol"), "card") or b"", ModelCard)
        bundle = redis_client.get(KEYS.tokenizer(card.tokenizer_digest)) or b""
        assert Tokenizer.from_bundle(bundle).digest == card.tokenizer_digest
        assert redis_client.zscore(KEYS.workers, worker_id) is not None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert redis_client.zscore(KEYS.workers, worker_id) is None


def _fail_to_start(*options: str, status: int) -> str:
    command = [sys.executable, "-m", "tidemill_gpuworker", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == status
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith(ERROR_PREFIX)
    return done.stderr


def test_a_missing_model_is_one_line_and_a_failure(
    redis_client: redis.Redis, redis_url: str
) -> None:
    message = _fail_to_start("--redis-url", redis_url, "--model", "/nowhere", status=2)
    assert "no directory or GGUF file '/nowhere'" in message
    assert redis_client.zcard(KEYS.workers) == 0


def test_a_wrong_flag_is_one_line_and_a_failure() -> None:
    message = _fail_to_start("--model", "/nowhere", "--no-such-flag", status=2)
    assert "--no-such-flag" in message and "--help" in message


def test_an_unreachable_broker_is_told_before_the_model_is_loaded() -> None:
    message = _fail_to_start(
        "--model", "/nowhere", "--redis-url", "redis://127.0.0.1:1/0", status=1
    )
    assert "broker does not answer" in message
