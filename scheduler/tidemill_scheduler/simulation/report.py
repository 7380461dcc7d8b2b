"""What one simulated run came to."""

import json
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from tidemill.protocol.errors import SimulationFailed
from tidemill_scheduler.simulation.ledger import ClassTimes, Ledger
from tidemill_scheduler.simulation.member import Member
from tidemill_scheduler.simulation.workload import Bound


@dataclass(frozen=True, slots=True)
class Spread:
    """Times in seconds; percentiles are by nearest rank, and all is 0 without any."""

    mean: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    max: float = 0.0


@dataclass(frozen=True, slots=True)
class ClassReport:
    """The finished jobs of one class of priority.

    ``ttft`` is from arrival to the first token, ``tpot`` the time for each token after it,
    ``wait`` from arrival to the first dispatch.
    """

    num_jobs: int
    ttft: Spread
    tpot: Spread
    wait: Spread
    finished_at: float


@dataclass(frozen=True, slots=True)
class PolicyCost:
    """Real time: of the policy for a dispatch, of the policy as a whole, of the whole run."""

    us_per_decision: float
    policy_seconds: float
    total_seconds: float
    events_per_second: float


@dataclass(frozen=True, slots=True)
class Report:
    """One run; times are seconds of the simulation, tokens are prompt tokens unless they say so.

    ``lost_tokens`` were found or computed for attempts that came to nothing.  ``bound_share`` is
    what one endless cache would find.  ``imbalance`` is the longest busy time of a worker over the
    mean, ``idle_share`` the part of the workers' time in which nothing ran.  ``service_gap`` is
    None with one tenant or too many.  ``cost`` is measured and not part of ``to_json``.
    """

    workload: str
    seed: int
    num_workers: int
    num_jobs: int
    num_finished: int
    num_cancelled: int
    input_tokens: int
    hit_tokens: int
    computed_tokens: int
    lost_tokens: int
    output_tokens: int
    hit_share: float
    bound_share: float
    share_of_bound: float
    makespan: float
    tokens_per_second: float
    ttft: Spread
    tpot: Spread
    wait: Spread
    by_class: dict[int, ClassReport]
    imbalance: float
    idle_share: float
    service_gap: int | None
    num_requeued: int
    num_fenced: int
    num_steps: int
    num_events: int
    num_ticks: int
    cost: PolicyCost | None = field(default=None, compare=False)

    def to_json(self) -> str:
        """Return everything that the seed fixes; the same run gives the same bytes."""
        values = asdict(self)
        del values["cost"]
        return json.dumps(values, sort_keys=True)


def make_report(
    bounds: Sequence[Bound],
    ledger: Ledger,
    members: Sequence[Member],
    *,
    name: str,
    seed: int,
    makespan: float,
) -> Report:
    """Add a run up; raises ``SimulationFailed`` if prompt tokens were lost or counted twice."""
    hits = sum(member.worker.hit_tokens for member in members)
    computed = sum(member.worker.computed_tokens for member in members)
    lost = sum(seq.num_done for seq in ledger.abandoned)
    check_tokens(ledger, hits, computed, lost)
    total = sum(bound.input_tokens for bound in bounds)
    bound_share = sum(bound.hit_tokens for bound in bounds) / total if total else 0.0
    hit_share = hits / (hits + computed) if hits else 0.0
    busy = [member.worker.busy_seconds for member in members]
    present = sum(_presence(member, makespan) for member in members)
    times = ledger.times.values()
    return Report(
        workload=name,
        seed=seed,
        num_workers=len(members),
        num_jobs=ledger.num_jobs,
        num_finished=ledger.num_finished,
        num_cancelled=ledger.num_cancelled,
        input_tokens=ledger.input_tokens,
        hit_tokens=hits,
        computed_tokens=computed,
        lost_tokens=lost,
        output_tokens=ledger.output_tokens,
        hit_share=hit_share,
        bound_share=bound_share,
        share_of_bound=hit_share / bound_share if bound_share else 1.0,
        makespan=makespan,
        tokens_per_second=ledger.input_tokens / makespan if makespan else 0.0,
        ttft=_spread(t.ttft for t in times),
        tpot=_spread(t.tpot for t in times),
        wait=_spread(t.wait for t in times),
        by_class={number: _class_report(times) for number, times in sorted(ledger.times.items())},
        imbalance=max(busy) * len(busy) / sum(busy) if any(busy) else 1.0,
        idle_share=max(0.0, 1 - sum(busy) / present) if present else 0.0,
        service_gap=ledger.gap.most,
        num_requeued=ledger.num_requeued,
        num_fenced=ledger.num_fenced,
        num_steps=sum(member.worker.num_steps for member in members),
        num_events=ledger.num_events,
        num_ticks=ledger.num_ticks,
    )


def check_tokens(ledger: Ledger, hits: int, computed: int, lost: int) -> None:
    """Raise ``SimulationFailed`` unless every prompt token was found or computed exactly once."""
    if hits + computed - lost != ledger.input_tokens:
        raise SimulationFailed(
            f"{hits} tokens found + {computed} computed - {lost} lost are not the "
            f"{ledger.input_tokens} tokens of the finished jobs",
            fix="Report this as a bug of the simulator.",
        )


def _presence(member: Member, makespan: float) -> float:
    left = makespan if member.left_at is None else min(member.left_at, makespan)
    return max(0.0, left - member.joined_at)


def _class_report(times: ClassTimes) -> ClassReport:
    return ClassReport(
        len(times.ttft),
        _spread([times.ttft]),
        _spread([times.tpot]),
        _spread([times.wait]),
        times.last_end,
    )


def _spread(parts: Iterable["array[float]"]) -> Spread:
    values = array("d")
    for part in parts:
        values.extend(part)
    if not values:
        return Spread()
    ordered = sorted(values)
    return Spread(
        math.fsum(ordered) / len(ordered), _rank(ordered, 0.5), _rank(ordered, 0.99), ordered[-1]
    )


def _rank(ordered: list[float], share: float) -> float:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
