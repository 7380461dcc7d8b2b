"""Online jobs with bulk beside them: how much bulk goes through, and what online jobs pay."""

from collections.abc import Mapping
from typing import NamedTuple

from scheduling_figures import Cell, Figure, Results, Scope
from scheduling_runs import Outcome, Spec


class Setting(NamedTuple):
    """What an operator chooses for a worker.

    ``step_tokens`` is the token budget of a step, ``cap_ms`` the longest step while interactive
    jobs decode (0 is none), ``kv_share`` the most of the KV cache that the batch class may fill.
    """

    step_tokens: int
    cap_ms: int
    kv_share: float

    @property
    def steps(self) -> str:
        """What it says of steps, as text."""
        cap = f"{self.cap_ms} ms" if self.cap_ms else "no cap"
        return f"T = {self.step_tokens}, {cap}"

    def __str__(self) -> str:
        return f"{self.steps}, {self.kv_share:.0%} KV"


#: Points of the frontier; the first ones are measured with every seed.
SETTINGS = (
    Setting(512, 50, 0.85),
    Setting(512, 50, 0.25),
    Setting(512, 0, 0.85),
    Setting(512, 25, 0.85),
    Setting(512, 50, 0.4),
    Setting(1024, 50, 0.4),
    Setting(1024, 50, 0.25),
)
_NUM_WITH_ALL_SEEDS = 2

#: Online TTFT may grow by this factor, and bulk is to go through this many times as fast as FIFO.
MAX_SLOWDOWN = 1.1
MIN_SPEEDUP = 2.5


class Trio(NamedTuple):
    """The runs of one setting: online jobs alone, with bulk in prefix order, and in FIFO order."""

    alone: Outcome
    prefix: Outcome
    fifo: Outcome

    @property
    def speedup(self) -> float:
        """Bulk in prefix order over bulk in FIFO order."""
        return self.prefix.bulk_rate / self.fifo.bulk_rate

    @property
    def slowdown(self) -> float:
        """TTFT p99 of online jobs with bulk in prefix order over that without bulk."""
        return _p99(self.prefix) / _p99(self.alone)


def _runs(seed: int, scope: Scope) -> dict[str, Spec]:
    base = Spec("conversation", seed, load=1.0, priority=-1, scale=scope.scale)
    settings = SETTINGS if scope.is_lead(seed) else SETTINGS[:_NUM_WITH_ALL_SEEDS]
    runs = {}
    for setting in settings:
        alone = base.but(step_tokens=setting.step_tokens, tpot_slo_ms=setting.cap_ms)
        both = alone.but(bulk="synthetic", bulk_copies=10)
        runs[_alone(setting)] = alone
        runs[_fifo(setting)] = both.but(policy="tidemill, fifo")
        runs[_prefix(setting)] = both.but(batch_ceiling=setting.kv_share)
    return runs


def _alone(setting: Setting) -> str:
    return f"{setting.steps}: online alone"


def _fifo(setting: Setting) -> str:
    return f"{setting.steps}: with FIFO bulk"


def _prefix(setting: Setting) -> str:
    return f"{setting}: with bulk in prefix order"


def _figures(results: Results) -> list[Figure]:
    figures = []
    for setting in SETTINGS:
        trios = [trio for o in results.by_seed if (trio := _trio(o, setting)) is not None]
        speedups = tuple(trio.speedup for trio in trios)
        slowdowns = tuple(trio.slowdown for trio in trios)
        figures.append(Figure(f"{setting}: bulk over FIFO bulk", speedups))
        figures.append(Figure(f"{setting}: TTFT p99 over online alone", slowdowns))
    best = tuple(_best_speedup(outcomes) for outcomes in results.by_seed)
    what = f"most bulk over FIFO bulk with TTFT p99 <= {MAX_SLOWDOWN}x"
    return [*figures, Figure(what, best, at_least=MIN_SPEEDUP)]


def _trio(outcomes: Mapping[str, Outcome], setting: Setting) -> Trio | None:
    labels = (_alone(setting), _prefix(setting), _fifo(setting))
    if not all(label in outcomes for label in labels):
        return None
    return Trio(*(outcomes[label] for label in labels))


def _best_speedup(outcomes: Mapping[str, Outcome]) -> float:
    """The most bulk that online jobs hardly feel, 0 if they feel it with every setting."""
    trios = (trio for setting in SETTINGS if (trio := _trio(outcomes, setting)) is not None)
    return max((t.speedup for t in trios if t.slowdown <= MAX_SLOWDOWN), default=0.0)


def _p99(outcome: Outcome) -> float:
    return outcome.report.by_class[0].ttft.p99


MIXED = Cell(
    "mixed", "Conversation at load 1.0 with bulk beside it", _runs, _figures, is_online=True
)
