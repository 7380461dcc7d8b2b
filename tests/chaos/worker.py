"""A worker process: the real shell around an engine whose next token is a hash of the history."""

import os
import random
import sys
import time

from chaos.plan import BEAT_SECONDS, FLAKY, HOPELESS, LEASE_SECONDS, POISON, UNFIT
from chaos.process import ProcessSpec
from support.fake_engine import FakeOutput, FakeProcessor, FakeRunner, FakeSampler
from support.worker_rig import BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS, make_card, make_tokenizer
from tidemill.protocol.calls import RetryPause
from tidemill.protocol.codec import WIRE_VERSION
from tidemill.protocol.errors import BrokerUnavailable, InvalidRequest
from tidemill.protocol.ids import new_worker_id
from tidemill.protocol.messages import WorkerInfo
from tidemill.service.log import setup_logging
from tidemill.service.runtime import CRASH_STATUS, Drain
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.engine.served_model import ServedModel
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.shell.outbox import PublishPolicy
from tidemill_gpuworker.shell.worker_process import ProcessConfig, WorkerProcess
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_plan import StepPlan
from tidemill_gpuworker.steps.step_scheduler import StepScheduler

#: How a worker ends that finds no broker at its start; its supervisor starts it again.
UNAVAILABLE_STATUS = 69

_STEP_SECONDS = 0.01
_MAX_SEQS = 64
_POLICY = PublishPolicy(stream_seconds=0.03, quiet_seconds=0.3, slack_seconds=0.01)
_RETRY = RetryPause(base_ms=200, cap_ms=2000)


def writer_tag(worker_id: str) -> str:
    """How a worker marks the text it generates."""
    return worker_id[-8:]


class ChaosRunner(FakeRunner):
    """Takes its time, keeps no record of its steps, and dies of a poison prompt."""

    def execute(self, plan: StepPlan) -> list[int]:
        """Compute a step."""
        time.sleep(_STEP_SECONDS)
        self.plans.clear()
        if any(POISON in item.seq.prompt_ids for item in plan.scheduled):
            os._exit(CRASH_STATUS)
        return super().execute(plan)


class TaggingProcessor(FakeProcessor):
    """One word per token, and in it who generated it: a stale writer gives itself away."""

    tag = ""

    def process(self, token_id: int) -> FakeOutput:
        """Take the next token."""
        output = super().process(token_id)
        return FakeOutput(f"{token_id}@{self.tag} ", output.finish)


def main(spec: ProcessSpec) -> int:
    """Serve until drained."""
    setup_logging("INFO", "worker")
    worker_id = new_worker_id()
    recorder = spec.recorder
    config = ProcessConfig(
        redis_url=spec.url,
        lease_seconds=LEASE_SECONDS,
        beat_seconds=BEAT_SECONDS,
        drain_seconds=10.0,
        farewell_seconds=3.0,
        policy=_POLICY,
        retry=_RETRY,
    )
    process = WorkerProcess(_make_model(worker_id), config)
    try:
        with Drain() as drain:
            done = process.run(
                drain, on_ready=lambda: recorder.record("ready", worker=worker_id, name=spec.name)
            )
    except BrokerUnavailable as error:
        print(f"error: {error.one_line()}", file=sys.stderr)
        return UNAVAILABLE_STATUS
    return 0 if done else 1


def _make_model(worker_id: str) -> ServedModel:
    tokenizer = make_tokenizer()
    info = WorkerInfo(
        worker_id=worker_id,
        model="m",
        block_size=BLOCK_SIZE,
        num_blocks=8 * NUM_BLOCKS,
        max_num_seqs=_MAX_SEQS,
        max_num_batched_tokens=512,
        wire_version=WIRE_VERSION,
        pid=os.getpid(),
    )
    return ServedModel(_make_engine(worker_id), tokenizer, make_card(tokenizer), info)


def _make_engine(worker_id: str) -> Engine:
    config = StepConfig(
        max_model_len=MAX_MODEL_LEN, max_num_seqs=_MAX_SEQS, max_num_batched_tokens=512
    )
    scheduler = StepScheduler(config, BlockManager(8 * NUM_BLOCKS, BLOCK_SIZE))
    TaggingProcessor.tag = writer_tag(worker_id)

    def make_processor(seq: Sequence) -> FakeProcessor:
        _make_trouble(seq.prompt_ids[-1])
        return TaggingProcessor(seq.params.max_tokens or 8)

    return Engine(ChaosRunner(8 * NUM_BLOCKS, BLOCK_SIZE), FakeSampler(), scheduler, make_processor)


def _make_trouble(last_token: int) -> None:
    if last_token == UNFIT:
        raise InvalidRequest("prompt: planted for the chaos", field="prompt")
    if last_token == HOPELESS or (last_token == FLAKY and random.random() < 0.5):
        raise RuntimeError("planted, may pass")
