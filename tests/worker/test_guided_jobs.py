"""Whole workers keep answers to their form, also where one goes on with another's job."""

import re
import threading
from collections.abc import Iterator

import pytest
import redis
import torch

from support.guided_engine import NoisyRunner, guided_seq, noisy_engine, run_all, text_of
from support.shard import read_log
from support.tiny_tokenizers import byte_level_tokenizer
from support.wait import wait_until
from support.worker_rig import PacedRunner, Rig, make_request, result_of, state_of
from tidemill.protocol.sampling import SamplingParams
from tidemill.protocol.states import JobState
from tidemill.protocol.structured import StructuredOutput
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.shell.claims import seed_of
from tidemill_gpuworker.steps.step_plan import StepPlan
from tidemill_gpuworker.structured_output.compiler import grammar_compiler

TOKENIZER = byte_level_tokenizer()
VOCAB_SIZE = TOKENIZER.vocab_size

PATTERN = r"(ab|cd){4,8}-[0-9]{6,12}"
STRUCTURED = StructuredOutput(regex=PATTERN)
PARAMS = SamplingParams(max_tokens=120)


class PacedNoise:
    """Noise instead of logits, for as many steps as the test allows."""

    def __init__(self, pace: PacedRunner) -> None:
        self._pace = pace
        self._noise = NoisyRunner(TOKENIZER, VOCAB_SIZE)

    def execute(self, plan: StepPlan) -> torch.Tensor:
        self._pace.wait_for_permit()
        return self._noise.execute(plan)


class GuidedRig(Rig):
    """A worker with real sampler, output and grammars over noise."""

    tokenizer: Tokenizer = TOKENIZER

    def make_engine(self) -> Engine:
        return noisy_engine(TOKENIZER, VOCAB_SIZE, PacedNoise(self.runner))


def new_rig(client: redis.Redis, url: str, epoch: int) -> GuidedRig:
    grammars = grammar_compiler(TOKENIZER, VOCAB_SIZE)
    return GuidedRig(client, url, epoch, tokenizer=TOKENIZER, grammars=grammars)


@pytest.fixture
def guided_rig(redis_client: redis.Redis, redis_url: str, epoch: int) -> Iterator[GuidedRig]:
    rig = new_rig(redis_client, redis_url, epoch)
    with rig.running():
        yield rig


def undisturbed(job_id: str) -> str:
    """What the job answers if nothing happens to it."""
    compiler = grammar_compiler(TOKENIZER, VOCAB_SIZE)
    assert compiler is not None
    seed = seed_of(job_id, make_request(params=PARAMS))
    seq = guided_seq(compiler, STRUCTURED, seq_id=job_id, seed=seed, max_tokens=120)
    told = run_all(noisy_engine(TOKENIZER, VOCAB_SIZE), [seq])
    compiler.close()
    return text_of(told[job_id])


def test_a_worker_that_takes_over_goes_on_within_the_form(
    redis_client: redis.Redis, redis_url: str, epoch: int, guided_rig: GuidedRig
) -> None:
    job_id = guided_rig.give(make_request(params=PARAMS, structured=STRUCTURED))
    guided_rig.step_until(lambda: len(read_log(redis_client, job_id).ids) >= 6)
    guided_rig.take_away(job_id)
    other = new_rig(redis_client, redis_url, epoch)
    with other.running():
        other.runner.run_free()
        other.dispatch(job_id)
        other.wait_for(job_id, "done")
    result = result_of(redis_client, job_id)
    assert result.end.finish_reason == "stop"
    assert re.fullmatch(PATTERN, result.text)
    assert result.text == undisturbed(job_id)


def test_a_form_that_cannot_be_enforced_fails_its_job_at_once(
    redis_client: redis.Redis, guided_rig: GuidedRig
) -> None:
    guided_rig.runner.run_free()
    refused = StructuredOutput.model_validate({"json_schema": {"not": {}}})
    job_id = guided_rig.give(make_request(params=PARAMS, structured=refused))
    guided_rig.wait_for(job_id, "failed")
    error = result_of(redis_client, job_id).end.error or ""
    assert error.startswith("structured.json_schema: 'not' cannot be enforced")


def test_other_jobs_run_while_one_waits_for_its_grammar(
    redis_client: redis.Redis, guided_rig: GuidedRig
) -> None:
    assert guided_rig.grammars is not None
    may_end = threading.Event()
    build = guided_rig.grammars._build

    def wait_and_build(structured: StructuredOutput) -> object:
        assert may_end.wait(60)
        return build(structured)

    guided_rig.grammars._build = wait_and_build  # type: ignore[assignment]
    guided_rig.runner.run_free()
    job_id = guided_rig.give(make_request(params=PARAMS, structured=STRUCTURED))
    guided_rig.wait_for_status(lambda status: status.num_waiting == 1)
    plain = guided_rig.give(make_request(params=SamplingParams(max_tokens=5, ignore_eos=True)))
    guided_rig.wait_for(plain, "done")
    assert state_of(redis_client, job_id) == JobState.RUNNING
    may_end.set()
    wait_until(lambda: state_of(redis_client, job_id) == "done", what="the guided job is done")
    assert re.fullmatch(PATTERN, result_of(redis_client, job_id).text)
