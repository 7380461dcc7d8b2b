"""What prefix caching costs where it finds nothing: inside it, around it, and on the whole."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from overheads_bookkeeping import bookkeeping_engine
from overheads_model import BLOCK_SIZE, NUM_BLOCKS, ServedAgain, draw_requests
from workloads import Request

from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.memory.block_pool import BlockPool
from tidemill_gpuworker.memory.prefix_lookup import PrefixLookup
from tidemill_gpuworker.steps.step_config import StepConfig

#: What a worker's steps hold on a CPU.
STEP_TOKENS = 512

#: All that is called because prefixes may be found: hashing, lookup, registration, what is told.
CALLS: dict[type, tuple[str, ...]] = {
    BlockManager: ("find_prefix", "count_prefix", "count_shared", "awaits", "collect_events"),
    PrefixLookup: ("block_hash",),
    BlockPool: ("publish", "unpublish"),
}


@dataclass(frozen=True)
class Workload:
    """Requests without common prefixes; with few blocks, old ones are evicted for new ones."""

    title: str
    num_requests: int
    prompt_len: int
    num_output: int
    num_blocks: int = NUM_BLOCKS

    def draw(self, vocab_size: int, seed: int) -> list[Request]:
        """Return the requests; another seed gives other tokens."""
        return draw_requests(self.num_requests, self.prompt_len, self.num_output, vocab_size, seed)


WORKLOADS = (
    Workload("prefill, 512 tokens a step", 8, 512, 1, num_blocks=100),
    Workload("decode, 16 sequences", 16, 32, 64),
    Workload("decode, 1 sequence", 1, 32, 64),
)


@dataclass(frozen=True)
class CachingCosts:
    """Medians of one workload; seconds of CPU time for each step.

    ``inside`` is what the calls took, ``around`` by how much all scheduling takes longer with
    caching than without; ``ratios`` are those of whole runs with it to whole runs without.
    """

    title: str
    step: float
    inside: float
    around: float
    ratios: list[float]

    @property
    def share(self) -> float:
        """The larger of the two measures, as a share of the step."""
        return max(self.inside, self.around) / self.step


class Stopwatch:
    """CPU time of this thread within the outermost of the calls that are watched."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    @contextmanager
    def watch(self, calls: dict[type, tuple[str, ...]]) -> Iterator[None]:
        """Time these methods of these classes meanwhile."""
        plain = [(owner, name, getattr(owner, name)) for owner in calls for name in calls[owner]]
        try:
            for owner, name, method in plain:
                setattr(owner, name, self._timed(method))
            yield
        finally:
            for owner, name, method in plain:
                setattr(owner, name, method)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def timed(*arguments: Any, **options: Any) -> Any:
            if self._depth:
                return method(*arguments, **options)
            self._depth, started = 1, time.thread_time()
            try:
                return method(*arguments, **options)
            finally:
                self.seconds += time.thread_time() - started
                self._depth = 0

        return timed


def measure_caching(
    model: ServedAgain, workload: Workload, repeat: int, *, scheduling_repeat: int = 20
) -> CachingCosts:
    """Serve the workload with caching, without, and with it under the stopwatch, by turns."""
    model.empty(caching=False)
    model.serve(workload.draw(model.vocab_size, seed=repeat)[:1])
    steps, inside, ratios = [], [], []
    for number in range(repeat):
        requests = workload.draw(model.vocab_size, seed=number)
        with_it, without, (watched, num_steps) = _by_turns(model, workload, requests, number)
        steps.append(without / num_steps)
        inside.append(watched / num_steps)
        ratios.append(with_it / without)
    around = [_scheduling(workload, number) for number in range(scheduling_repeat)]
    return CachingCosts(
        workload.title,
        statistics.median(steps),
        statistics.median(inside),
        statistics.median(around),
        ratios,
    )


def _by_turns(
    model: ServedAgain, workload: Workload, requests: list[Request], number: int
) -> tuple[float, float, tuple[float, int]]:
    def run(caching: bool) -> float:
        model.empty(caching=caching, num_blocks=workload.num_blocks)
        gc.collect()
        serving = model.serve(requests)
        assert not model.num_hit_tokens, "the prompts have nothing in common"
        return serving.cpu_seconds

    # Whoever goes first finds other caches of the processor than who goes second.
    order = (True, False) if number % 2 else (False, True)
    seconds = {caching: run(caching) for caching in order}
    model.empty(caching=True, num_blocks=workload.num_blocks)
    stopwatch = Stopwatch()
    with stopwatch.watch(CALLS):
        serving = model.serve(requests)
    return seconds[True], seconds[False], (stopwatch.seconds, serving.num_steps)


def _scheduling(workload: Workload, seed: int) -> float:
    """By how many seconds a step's bookkeeping alone takes longer, without a model."""
    requests = workload.draw(50_000, seed)
    config = StepConfig(max_model_len=8192, max_num_batched_tokens=STEP_TOKENS)
    engine = bookkeeping_engine(config, workload.num_blocks, BLOCK_SIZE)
    seconds = {}
    for caching in (True, False) if seed % 2 else (False, True):
        model = ServedAgain(engine, 50_000)
        model.empty(caching=caching, num_blocks=workload.num_blocks)
        gc.collect()
        serving = model.serve(requests)
        seconds[caching] = serving.cpu_seconds / serving.num_steps
    return seconds[True] - seconds[False]
