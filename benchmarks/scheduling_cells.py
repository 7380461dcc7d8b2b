"""The cells of the scheduling benchmark: each line of what the simulation must show."""

from collections.abc import Sequence

from scheduling_figures import (
    Cell,
    Figure,
    Results,
    Scope,
    computed,
    hit_share,
    longest_wait,
    makespan,
    mean_ttft,
    percent_of_bound,
)
from scheduling_mixed import MIXED
from scheduling_runs import TRACE_NAMES, Outcome, Spec

from tidemill_scheduler.simulation.policies import POLICIES

KV_ROUTER = "dynamo-style"
ONLINE_POLICIES = ("tidemill", "fifo", "sglang-style", "dynamo-style", "lmetric-style")
INTERACTIVE = -1

#: Disjoint copies of a trace that keep a thousand workers busy.
_COPIES = 40
#: A tenant's visit, in tokens, in which the target for the service gap is told.
_QUANTUM = 8192
_RTTS_MS = (0, 5, 20)

#: Workload -> per cent of the bound that are asked for.
_SHAPES = {"eval57": 99.8, "tenants": 99.0, "best-of-8": 98.0, "rag5": 99.0, "rag5-canonical": 99.0}


def _scale_runs(seed: int, scope: Scope) -> dict[str, Spec]:
    runs = {}
    for trace in TRACE_NAMES:
        spec = Spec(trace, seed, scale=scope.scale)
        runs[f"{trace}, 1 worker"] = spec.but(workers=1)
        runs[f"{trace}, 8 workers"] = spec
        if scope.is_lead(seed):
            runs[f"{trace}, 1,000 workers"] = spec.but(
                workers=max(8, round(1000 * scope.scale)), copies=_COPIES
            )
    return runs


def _scale_figures(results: Results) -> list[Figure]:
    figures = [
        Figure(label, results.values(label, percent_of_bound), "% of the bound", at_least=99.0)
        for label in results.labels
    ]
    for trace in TRACE_NAMES:
        drops = results.points(f"{trace}, 1 worker", f"{trace}, 1,000 workers", hit_share)
        what = f"{trace}, hit rate lost from 1 to 1,000 workers"
        figures.append(Figure(what, drops, "points", at_most=0.5))
    return figures


def _rag_runs(seed: int, scope: Scope) -> dict[str, Spec]:
    return {name: Spec("rag1", seed, name, scale=scope.scale) for name in POLICIES}


def _rag_figures(results: Results) -> list[Figure]:
    return [
        Figure(
            f"makespan of {KV_ROUTER} over ours",
            results.ratios(KV_ROUTER, "tidemill", makespan),
            at_least=2.5,
        ),
        Figure(
            "hit rate", results.values("tidemill", percent_of_bound), "% of the bound", at_least=99
        ),
    ]


def _policies_runs(seed: int, scope: Scope) -> dict[str, Spec]:
    if not scope.is_lead(seed):
        return {}
    return {
        f"{trace}, {name}": Spec(trace, seed, name, scale=scope.scale)
        for trace in TRACE_NAMES
        for name in POLICIES
    }


def _policies_figures(results: Results) -> list[Figure]:
    return [
        Figure(
            f"{trace}, makespan of {KV_ROUTER} over ours",
            results.ratios(f"{trace}, {KV_ROUTER}", f"{trace}, tidemill", makespan),
        )
        for trace in TRACE_NAMES
    ]


def _shapes_runs(seed: int, scope: Scope) -> dict[str, Spec]:
    if not scope.is_lead(seed):
        return {}
    return {
        f"{shape}, {name}": Spec(shape, seed, name, scale=scope.scale)
        for shape in _SHAPES
        for name in ("tidemill", "sglang-style", KV_ROUTER)
    }


def _shapes_figures(results: Results) -> list[Figure]:
    figures = []
    for shape, target in _SHAPES.items():
        shares = results.values(f"{shape}, tidemill", percent_of_bound)
        figures.append(Figure(f"{shape}, hit rate", shares, "% of the bound", at_least=target))
        times = results.ratios(f"{shape}, {KV_ROUTER}", f"{shape}, tidemill", makespan)
        figures.append(Figure(f"{shape}, makespan of {KV_ROUTER} over ours", times))
    return figures


def _online(trace: str, seed: int, scope: Scope, load: float, kv_factor: int = 1) -> Spec:
    return Spec(
        trace,
        seed,
        load=load,
        kv_factor=kv_factor,
        priority=INTERACTIVE,
        step_tokens=2048,
        scale=scope.scale,
    )


def _overload_runs(seed: int, scope: Scope) -> dict[str, Spec]:
    spec = _online("conversation", seed, scope, 3.0)
    return {name: spec.but(policy=name) for name in ONLINE_POLICIES}


def _overload_figures(results: Results) -> list[Figure]:
    return [
        Figure(
            f"mean TTFT of {KV_ROUTER} over ours",
            results.ratios(KV_ROUTER, "tidemill", mean_ttft),
            at_least=5.0,
        ),
        Figure("mean TTFT of fifo over ours", results.ratios("fifo", "tidemill", mean_ttft)),
        Figure(
            f"longest wait over that of {KV_ROUTER}",
            results.ratios("tidemill", KV_ROUTER, longest_wait),
            at_most=1.0,
        ),
    ]


#: Label, trace, load, KV factor of the online cells that are information.
_ONLINE_CELLS = (
    ("conversation 2.6", "conversation", 2.6, 1),
    ("conversation 3.0, 4x KV", "conversation", 3.0, 4),
    ("conversation 4.0", "conversation", 4.0, 1),
    ("synthetic 3.2", "synthetic", 3.2, 1),
    ("synthetic 3.2, 4x KV", "synthetic", 3.2, 4),
)


def _online_runs(seed: int, scope: Scope) -> dict[str, Spec]:
    if not scope.is_lead(seed):
        return {}
    return {
        f"{label}: {name}": _online(trace, seed, scope, load, kv).but(policy=name)
        for label, trace, load, kv in _ONLINE_CELLS
        for name in ONLINE_POLICIES
    }


def _online_figures(results: Results) -> list[Figure]:
    figures = []
    for label, *_ in _ONLINE_CELLS:
        times = results.ratios(f"{label}: {KV_ROUTER}", f"{label}: tidemill", mean_ttft)
        figures.append(Figure(f"{label}, mean TTFT of {KV_ROUTER} over ours", times))
    return figures


def _fair_runs(seed: int, scope: Scope) -> dict[str, Spec]:
    spec = Spec("fair-tenants", seed, scale=scope.scale)
    names = ("tidemill", "tidemill, unfair", "fifo", KV_ROUTER)
    return {name: spec.but(policy=name) for name in names}


def _fair_figures(results: Results) -> list[Figure]:
    loss = results.points("tidemill, unfair", "tidemill", hit_share)
    gaps = results.values("tidemill", lambda report: float(report.service_gap or 0))
    unfair = results.values("tidemill, unfair", lambda report: float(report.service_gap or 0))
    return [
        Figure("service gap", gaps, "tokens", at_most=5 * _QUANTUM),
        Figure("service gap without fairness", unfair, "tokens"),
        Figure("hit rate lost to fairness", loss, "points", at_most=1.0),
    ]


def _death_runs(seed: int, scope: Scope) -> dict[str, Spec]:
    runs = {}
    for trace in TRACE_NAMES:
        runs[f"{trace}, all live"] = spec = Spec(trace, seed, scale=scope.scale)
        runs[f"{trace}, one of 8 dies at T/3"] = spec.but(dies_after=1 / 3)
    return runs


def _death_figures(results: Results) -> list[Figure]:
    figures = []
    for trace in TRACE_NAMES:
        pair = (f"{trace}, one of 8 dies at T/3", f"{trace}, all live")
        extra = tuple(100 * (ratio - 1) for ratio in results.ratios(*pair, computed))
        figures.append(Figure(f"{trace}, tokens computed more", extra, "%", at_most=3.0))
        lost = results.values(pair[0], lambda report: report.num_jobs - report.num_finished)
        figures.append(Figure(f"{trace}, jobs lost", lost, "jobs", at_most=0))
    return figures


def _cache_runs(seed: int, scope: Scope) -> dict[str, Spec]:
    runs = {}
    for trace in TRACE_NAMES:
        spec = Spec(trace, seed, scale=scope.scale)
        runs[f"{trace}, tidemill at 1x KV"] = spec
        for name in ("sglang-style", KV_ROUTER):
            runs[f"{trace}, {name} at 10x KV"] = spec.but(policy=name, kv_factor=10)
    return runs


def _cache_figures(results: Results) -> list[Figure]:
    return [
        Figure(
            f"{trace}, hit rate above {name} with ten times the KV",
            results.points(f"{trace}, tidemill at 1x KV", f"{trace}, {name} at 10x KV", hit_share),
            "points",
            at_least=0.0,
        )
        for trace in TRACE_NAMES
        for name in ("sglang-style", KV_ROUTER)
    ]


def _hop_runs(seed: int, scope: Scope) -> dict[str, Spec]:
    return {
        f"{workload}, {rtt} ms": Spec(
            workload, seed, step_tokens=2048, rtt_ms=rtt, scale=scope.scale
        )
        for workload in ("eval57", "rag1")
        for rtt in _RTTS_MS
    }


def _hop_figures(results: Results) -> list[Figure]:
    figures = []
    for workload in ("eval57", "rag1"):
        for rtt in _RTTS_MS[1:]:
            times = results.ratios(f"{workload}, {rtt} ms", f"{workload}, 0 ms", makespan)
            loss = tuple(100 * (ratio - 1) for ratio in times)
            what = f"{workload}, makespan lost to {rtt} ms"
            figures.append(Figure(what, loss, "%", at_most=0.5))
    return figures


def _lag_runs(seed: int, scope: Scope) -> dict[str, Spec]:
    bulk = Spec("conversation", seed, scale=scope.scale)
    online = _online("conversation", seed, scope, 3.0)
    return {
        "bulk": bulk,
        "bulk, KV events up to 500 ms late": bulk.but(kv_lag_ms=500),
        "load 3.0": online,
        "load 3.0, KV events up to 500 ms late": online.but(kv_lag_ms=500),
    }


def _lag_figures(results: Results) -> list[Figure]:
    late = "load 3.0, KV events up to 500 ms late"
    hits = results.points("bulk", "bulk, KV events up to 500 ms late", hit_share)
    return [
        Figure("bulk, hit rate lost", hits, "points"),
        Figure("load 3.0, mean TTFT with late events", results.ratios(late, "load 3.0", mean_ttft)),
    ]


def _same_runs(seed: int, scope: Scope) -> dict[str, Spec]:
    scale = 0.1 * scope.scale
    online = _online("conversation", seed, scope, 3.0).but(scale=scale, kv_lag_ms=500)
    bulk = Spec("rag1", seed, rtt_ms=5, dies_after=1 / 3, scale=scale)
    specs = {"online": online, "bulk": bulk}
    return {
        f"{name}, run {repeat + 1}": spec.but(repeat=repeat)
        for name, spec in specs.items()
        for repeat in range(2)
    }


def _same_figures(results: Results) -> list[Figure]:
    differing = tuple(float(_num_differing(list(o.values()))) for o in results.by_seed)
    return [Figure("reports that differ between two processes", differing, "", at_most=0)]


def _num_differing(outcomes: Sequence[Outcome]) -> int:
    pairs = zip(outcomes[::2], outcomes[1::2], strict=True)
    return sum(first.digest != second.digest for first, second in pairs)


CELLS = (
    Cell("scale", "Traces as bulk, from 1 to 1,000 workers", _scale_runs, _scale_figures),
    Cell("rag", "Questions on long documents, 8 workers", _rag_runs, _rag_figures),
    Cell("policies", "Traces as bulk, 8 workers", _policies_runs, _policies_figures),
    Cell("shapes", "Other shapes of sharing, 8 workers", _shapes_runs, _shapes_figures),
    Cell(
        "overload",
        "Conversation at load 3.0, T = 2048",
        _overload_runs,
        _overload_figures,
        is_online=True,
    ),
    Cell(
        "online", "Other loads and caches, T = 2048", _online_runs, _online_figures, is_online=True
    ),
    Cell("fair", "Eight tenants, one with four times the jobs", _fair_runs, _fair_figures),
    MIXED,
    Cell("death", "A worker dies", _death_runs, _death_figures),
    Cell("cache", "A tenth of the cache", _cache_runs, _cache_figures),
    Cell("hop", "A network between, T = 2048", _hop_runs, _hop_figures),
    Cell("lag", "What is known of caches is old", _lag_runs, _lag_figures, is_online=True),
    Cell("same", "The same seed gives the same bytes", _same_runs, _same_figures),
)
