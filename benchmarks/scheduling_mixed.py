"""Online jobs with bulk beside them: how much bulk goes through, and what online jobs pay."""

from collections.abc import Mapping

from scheduling_figures import Cell, Figure, Results, Scope
from scheduling_runs import Outcome, Spec

#: Caps on the time of a step while interactive jobs decode, in ms; 0 is none.
CAPS_MS = (0, 100, 50, 35, 25)

#: A seed other than the first is measured with these caps alone.
_SEED_CAPS_MS = (0, 50)

#: Online TTFT may grow by this factor, and bulk is to go through this many times as fast as FIFO.
MAX_SLOWDOWN = 1.1
MIN_SPEEDUP = 2.5

_KINDS = ("online alone", "bulk in prefix order", "bulk in FIFO order")


def _runs(seed: int, scope: Scope) -> dict[str, Spec]:
    alone = Spec("conversation", seed, load=1.0, priority=-1, step_tokens=512, scale=scope.scale)
    both = alone.but(bulk="synthetic", bulk_copies=10)
    specs = (alone, both, both.but(policy="tidemill, fifo"))
    return {
        _label(kind, cap): spec.but(tpot_slo_ms=cap)
        for cap in (CAPS_MS if scope.is_lead(seed) else _SEED_CAPS_MS)
        for kind, spec in zip(_KINDS, specs, strict=True)
    }


def _label(kind: str, cap: int) -> str:
    return f"{kind}, {f'steps <= {cap} ms' if cap else 'no cap'}"


def _figures(results: Results) -> list[Figure]:
    figures = []
    for cap in CAPS_MS:
        alone, prefix, fifo = (_label(kind, cap) for kind in _KINDS)
        runs = [o for o in results.by_seed if prefix in o]
        if not runs:
            continue
        name = f"steps <= {cap} ms" if cap else "no cap"
        speedups = tuple(o[prefix].bulk_rate / o[fifo].bulk_rate for o in runs)
        slowdowns = tuple(_p99(o[prefix]) / _p99(o[alone]) for o in runs)
        fifo_slowdowns = tuple(_p99(o[fifo]) / _p99(o[alone]) for o in runs)
        figures += [
            Figure(f"{name}: bulk over FIFO bulk", speedups),
            Figure(f"{name}: online TTFT p99 over online alone", slowdowns),
            Figure(f"{name}: the same with FIFO bulk", fifo_slowdowns),
        ]
    best = tuple(_best_speedup(outcomes) for outcomes in results.by_seed)
    what = f"most bulk over FIFO bulk with TTFT p99 <= {MAX_SLOWDOWN}x"
    return [*figures, Figure(what, best, at_least=MIN_SPEEDUP)]


def _best_speedup(outcomes: Mapping[str, Outcome]) -> float:
    """The most bulk in prefix order that online jobs hardly feel, over FIFO bulk with that cap."""
    best = 0.0
    for cap in CAPS_MS:
        alone, prefix, fifo = (outcomes.get(_label(kind, cap)) for kind in _KINDS)
        if alone is None or prefix is None or fifo is None:
            continue
        if _p99(prefix) <= MAX_SLOWDOWN * _p99(alone):
            best = max(best, prefix.bulk_rate / fifo.bulk_rate)
    return best


def _p99(outcome: Outcome) -> float:
    return outcome.report.by_class[0].ttft.p99


MIXED = Cell(
    "mixed",
    "Conversation at load 1.0 with bulk beside it, T = 512",
    _runs,
    _figures,
    is_online=True,
)
