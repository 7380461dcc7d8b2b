"""A whole worker around the fake engine, and the scheduler's part played by the test."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import redis
import tokenizers
from tokenizers import models, pre_tokenizers

from support import shard
from support.fake_engine import VOCAB_SIZE, FakeOutput, FakeProcessor, FakeRunner, FakeSampler
from support.shard import KEYS
from support.wait import wait_until
from tidemill.protocol import calls
from tidemill.protocol.calls import RetryPause
from tidemill.protocol.codec import WIRE_VERSION, decode
from tidemill.protocol.functions import run
from tidemill.protocol.ids import new_job_id, new_worker_id
from tidemill.protocol.messages import (
    DEFAULT_RETRIES,
    GenerateRequest,
    JobResult,
    JobTerms,
    ModelCard,
    WorkerInfo,
    WorkerStatus,
)
from tidemill.protocol.sampling import SamplingParams
from tidemill.service.runtime import Drain
from tidemill.service.tokenizer import Tokenizer
from tidemill.service.tokenizer_files import TokenizerFiles
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.engine.served_model import ServedModel
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.shell.outbox import PublishPolicy
from tidemill_gpuworker.shell.worker_process import ProcessConfig, WorkerProcess
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_plan import StepPlan
from tidemill_gpuworker.steps.step_scheduler import StepScheduler
from tidemill_gpuworker.structured_output.compiler import GrammarCompiler

BLOCK_SIZE = 4
NUM_BLOCKS = 256
MAX_MODEL_LEN = 128
WORDS = ("<eos>", "tide", "mill", "water", "wheel", "grain")

#: Publishes fast, so that tests need not wait.
FAST = PublishPolicy(stream_seconds=0.002, quiet_seconds=0.004, slack_seconds=0.0)


#: A prompt with this token has an output that cannot be turned into text from the third token on.
GARBLED = 777


class GarbledProcessor(FakeProcessor):
    """Fails in mid-stream."""

    def process(self, token_id: int) -> FakeOutput:
        """Take two tokens, refuse the third."""
        if len(self.taken) == 2:
            raise UnicodeError("planted")
        return super().process(token_id)


PROCESSORS: Mapping[int, type[FakeProcessor]] = {GARBLED: GarbledProcessor}


class PacedRunner(FakeRunner):
    """A fake model that computes only as many steps as it is allowed, and fails on command.

    A step raises if a sequence in it has a token of ``poison`` in its prompt and ``poison_from``
    tokens of output, or if it holds more than ``max_sequences``.
    """

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE)
        self.poison: set[int] = set()
        self.poison_from = 0
        self.max_sequences = NUM_BLOCKS
        self._permits = threading.Semaphore(0)
        self._is_free = threading.Event()
        self.waiting = threading.Event()

    def allow(self, num_steps: int) -> None:
        """Let so many more steps pass."""
        for _ in range(num_steps):
            self._permits.release()

    def run_free(self) -> None:
        """Let all steps pass from now on."""
        self._is_free.set()
        self._permits.release()

    def wait_for_permit(self) -> None:
        """Wait until the next step may pass."""
        self.waiting.set()
        if not self._is_free.is_set():
            self._permits.acquire()
        self.waiting.clear()

    def execute(self, plan: StepPlan) -> list[int]:
        """Wait for a permit, fail if told so, then do as the fake runner does."""
        self.wait_for_permit()
        for item in plan.scheduled:
            is_ripe = len(item.seq.output_ids) >= self.poison_from
            if is_ripe and self.poison.intersection(item.seq.prompt_ids):
                raise RuntimeError("a poisoned prompt")
        if len(plan.scheduled) > self.max_sequences:
            raise RuntimeError("the batch is too large")
        return super().execute(plan)


def make_tokenizer() -> Tokenizer:
    """One token per word of ``WORDS``; unknown words become token 0."""
    return Tokenizer(make_tokenizer_files())


def make_tokenizer_files() -> TokenizerFiles:
    """The files of that tokenizer."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    raw = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return TokenizerFiles(raw.to_str(), eos_token_ids=(0,))


def make_engine(
    runner: FakeRunner,
    num_blocks: int = NUM_BLOCKS,
    processors: Mapping[int, type[FakeProcessor]] = PROCESSORS,
) -> Engine:
    """An engine whose sequences end after ``max_tokens``, 8 by default.

    A token of the prompt may choose who processes the output.
    """
    config = StepConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=64, max_num_batched_tokens=256)
    scheduler = StepScheduler(config, BlockManager(num_blocks, BLOCK_SIZE))

    def make_processor(seq: Sequence) -> FakeProcessor:
        chosen = (processors[token] for token in seq.prompt_ids if token in processors)
        return next(chosen, FakeProcessor)(seq.params.max_tokens or 8)

    return Engine(runner, FakeSampler(), scheduler, make_processor)


def make_card(tokenizer: Tokenizer) -> ModelCard:
    """The card of model ``m``."""
    return ModelCard(
        name="m",
        revision="r1",
        tokenizer_digest=tokenizer.digest,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        block_size=BLOCK_SIZE,
    )


def make_request(
    prompt_ids: tuple[int, ...] | None = (1, 2, 3), num_tokens: int = 8, **options: object
) -> GenerateRequest:
    """A greedy request for the model ``m``."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    fields = {"model": "m", "prompt_ids": prompt_ids, "params": params} | options
    return GenerateRequest.model_validate(fields)


def submit(client: redis.Redis, request: GenerateRequest, terms: JobTerms | None = None) -> str:
    """Put a job on its queue; returns its id."""
    run(client, calls.salt(KEYS, tenant=request.tenant, random=b"\x07" * 16))
    job = calls.NewJob(new_job_id(), request, terms=terms or JobTerms())
    return run(client, calls.submit(KEYS, job)).job_id


def state_of(client: redis.Redis, job_id: str) -> str:
    """The state of a job."""
    return (client.hget(KEYS.job(job_id), "st") or b"gone").decode()


def result_of(client: redis.Redis, job_id: str) -> JobResult:
    """The stored result of a job that a worker ended."""
    return decode(client.hget(KEYS.job(job_id), "res") or b"", JobResult)


@dataclass
class Rig:
    """One worker in this process, on a thread of its own, and the broker it works with."""

    client: redis.Redis
    url: str
    epoch: int
    runner: PacedRunner = field(default_factory=PacedRunner)
    config: dict[str, object] = field(default_factory=dict)
    num_blocks: int = NUM_BLOCKS
    processors: Mapping[int, type[FakeProcessor]] = field(default_factory=lambda: PROCESSORS)
    tokenizer: Tokenizer = field(default_factory=make_tokenizer)
    grammars: GrammarCompiler | None = None
    error: BaseException | None = None
    left_clean: bool | None = None

    def __post_init__(self) -> None:
        self.card = make_card(self.tokenizer)
        self.info = WorkerInfo(
            worker_id=new_worker_id(),
            model="m",
            block_size=BLOCK_SIZE,
            num_blocks=self.num_blocks,
            max_num_seqs=64,
            max_num_batched_tokens=256,
            wire_version=WIRE_VERSION,
        )
        self.engine = self.make_engine()
        self.drain = Drain()
        settings = {
            "lease_seconds": 2.0,
            "beat_seconds": 0.05,
            "drain_seconds": 10.0,
            "farewell_seconds": 3.0,
            "policy": FAST,
            "retry": RetryPause(base_ms=1, cap_ms=5),
        }
        config = ProcessConfig(redis_url=self.url, **settings | self.config)  # type: ignore[arg-type]
        model = ServedModel(
            self.engine, self.tokenizer, self.card, self.info, grammars=self.grammars
        )
        self.process = WorkerProcess(model, config)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)

    def make_engine(self) -> Engine:
        """The engine around the runner."""
        return make_engine(self.runner, self.num_blocks, self.processors)

    @property
    def worker_id(self) -> str:
        """The worker's id."""
        return self.info.worker_id

    @property
    def has_left(self) -> bool:
        """Whether the worker has ended."""
        return not self._thread.is_alive()

    def start(self) -> None:
        """Start the worker and wait until it takes jobs."""
        self._thread.start()
        assert self._ready.wait(30) and self.error is None

    def stop(self) -> None:
        """Drain the worker and wait for its end."""
        self.runner.run_free()
        self.drain.request()
        self.join()

    def begin_drain(self) -> None:
        """Ask for a drain and let the engine step until the worker says that it drains."""
        self.drain.request()
        self.step_until(lambda: self.last_status().draining)

    def step_until(self, predicate: Callable[[], bool]) -> None:
        """Let the engine make one step after the other until something holds."""

        def holds() -> bool:
            self.runner.allow(1)
            return predicate()

        wait_until(holds)

    def join(self) -> None:
        """Wait until the worker has left."""
        self._thread.join(30)
        assert not self._thread.is_alive(), "the worker does not leave"

    def give(self, request: GenerateRequest, lease_ms: int = 60_000) -> str:
        """Submit a job and dispatch it to this worker."""
        job_id = submit(self.client, request)
        self.dispatch(job_id, lease_ms)
        return job_id

    def dispatch(self, job_id: str, lease_ms: int = 60_000) -> int:
        """Dispatch a queued job to this worker; returns the fence."""
        queue = (self.client.hget(KEYS.job(job_id), "qn") or b"").decode()
        call = calls.dispatch(
            KEYS,
            job_id=job_id,
            queue=queue,
            entry_id=shard.entry_of(self.client, job_id),
            worker_id=self.worker_id,
            epoch=self.epoch,
            lease_ms=lease_ms,
        )
        fence = run(self.client, call).fence
        assert fence > 0, "the job was not queued"
        return fence

    def retry(self, job_id: str) -> int:
        """Wait until a job was given back after an error, and dispatch it again at once."""
        self.wait_for(job_id, "delayed")
        queue = (self.client.hget(KEYS.job(job_id), "qn") or b"").decode()
        promote = calls.promote(KEYS, job_id=job_id, queue=queue)
        wait_until(lambda: run(self.client, promote), what="the pause is over")
        return self.dispatch(job_id)

    def exhaust(self, job_id: str) -> None:
        """Dispatch a job that fails each time until its retries are used up."""
        for _ in range(DEFAULT_RETRIES):
            self.retry(job_id)
        self.wait_for(job_id, "dead")

    def take_away(self, job_id: str) -> None:
        """Requeue a running job as if its lease had run out."""

        def reaped() -> bool:
            # The heartbeat may renew the lease in between.
            shard.expire_lease(self.client, job_id)
            return shard.reap(self.client, job_id) == 1

        wait_until(reaped, what="the job is requeued")

    def wait_for(self, job_id: str, state: str) -> None:
        """Wait until the job is in this state."""
        wait_until(lambda: state_of(self.client, job_id) == state, what=f"{job_id} is {state}")

    def wait_for_tokens(self, job_id: str, num_tokens: int) -> None:
        """Wait until the job's log holds at least so many tokens."""
        wait_until(
            lambda: int(self.client.hget(KEYS.job(job_id), "n") or 0) >= num_tokens,
            what=f"{job_id} has {num_tokens} tokens",
        )

    def last_status(self) -> WorkerStatus:
        """The latest status that the scheduler could see."""
        entries = self.client.xrevrange(KEYS.status(self.worker_id), count=1)
        return decode(entries[0][1][b"s"], WorkerStatus) if entries else WorkerStatus()

    def wait_for_status(self, predicate: Callable[[WorkerStatus], bool]) -> WorkerStatus:
        """Wait for a status with a property."""
        return wait_until(
            lambda: status if predicate(status := self.last_status()) else None,
            what=f"no such status; the last is {self.last_status()}",
        )

    def _run(self) -> None:
        try:
            self.left_clean = self.process.run(self.drain, on_ready=self._ready.set)
        except BaseException as error:
            self.error = error
        finally:
            self._ready.set()

    @contextmanager
    def running(self) -> Iterator["Rig"]:
        """The worker runs inside the block and is stopped after it."""
        self.start()
        try:
            yield self
        finally:
            self.stop()
