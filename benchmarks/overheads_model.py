"""A model that serves one workload after the other, each with a prefix cache that is empty."""

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from workloads import Request

from tidemill.protocol.sampling import SamplingParams
from tidemill.service.config import load_config
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.loading.model_setup import load_model
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.options.worker_config import WorkerConfig
from tidemill_gpuworker.steps.step_scheduler import StepScheduler

BLOCK_SIZE = 16
#: Blocks of the KV cache, more than any of the workloads needs at a time.
NUM_BLOCKS = 1024
# Ids below are control tokens and single bytes in many vocabularies.
_FIRST_ID = 1000


@dataclass(frozen=True)
class Settings:
    """How the model is loaded."""

    model_dir: Path
    dtype: str
    threads: int


@dataclass
class Serving:
    """What serving a workload took, and the first token of each request with its time."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    num_steps: int = 0
    first_ids: dict[str, int] = field(default_factory=dict)
    first_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def first_token_p50(self) -> float:
        """Median seconds to the first token; all requests arrived at once."""
        return statistics.median(self.first_seconds.values())


class ServedAgain:
    """An engine whose cache can be emptied, so that runs do not know of each other."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self.engine = engine
        self.vocab_size = vocab_size

    @property
    def num_hit_tokens(self) -> int:
        """Tokens that were found in the cache since it was emptied."""
        return self.engine.step_scheduler.num_hit_tokens

    def empty(self, *, caching: bool, num_blocks: int = NUM_BLOCKS) -> None:
        """Begin with a new cache of so many blocks, in which prefixes are found or not."""
        blocks = BlockManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=caching)
        self.engine.step_scheduler = StepScheduler(self.engine.step_scheduler.config, blocks)

    def serve(self, requests: list[Request]) -> Serving:
        """Serve requests that arrive at once, greedy, each to its last token."""
        for index, request in enumerate(requests):
            self.engine.add(_sequence(str(index), request))
        serving = Serving()
        started, cpu_started = time.perf_counter(), time.process_time()
        while self.engine.has_work:
            for output in self.engine.step():
                seq_id = output.seq.seq_id
                if seq_id not in serving.first_ids:
                    serving.first_ids[seq_id] = output.new_ids[0]
                    serving.first_seconds[seq_id] = time.perf_counter() - started
            # As a worker does between steps, to tell the scheduler of its cache.
            self.engine.step_scheduler.block_manager.collect_events()
            serving.num_steps += 1
        serving.seconds = time.perf_counter() - started
        serving.cpu_seconds = time.process_time() - cpu_started
        return serving


def load(settings: Settings) -> ServedAgain:
    """Load the model with the worker's own defaults, and warm it up."""
    config = WorkerConfig(
        model_dir=settings.model_dir,
        served_model_name="benchmark",
        redis_url="",
        service=load_config(),
        device="cpu",
        dtype=settings.dtype,
        num_threads=settings.threads,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=NUM_BLOCKS,
        swap_space=0.0,
    )
    served = load_model(config)
    assert isinstance(served.engine, Engine), "the model generates"
    return ServedAgain(served.engine, served.card.vocab_size)


def draw_requests(
    number: int, prompt_len: int, num_output: int, vocab_size: int, seed: int = 0
) -> list[Request]:
    """Return requests whose prompts have nothing in common."""
    generator = np.random.default_rng(seed)
    prompts = generator.integers(_FIRST_ID, vocab_size, (number, prompt_len)).tolist()
    return [Request(prompt, num_output) for prompt in prompts]


def _sequence(seq_id: str, request: Request) -> Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=request.num_output, ignore_eos=True)
    return Sequence(seq_id, request.prompt, params, seed=0)
