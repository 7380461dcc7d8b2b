"""From a seed to everything that will be tried: jobs, cancellations and faults.  Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

#: Everything that the last one has waiting is cancelled now and then.
TENANTS = ("default", "blue", "red")
NUM_WORKERS = 3
NUM_SCHEDULERS = 2
NUM_PRODUCERS = 2

LEASE_SECONDS = 2.0
BEAT_SECONDS = 0.5
LEADER_LEASE_SECONDS = 1.0
#: Deaths of workers without a new token after which a job is dead.
MAX_CRASHES = 3

#: Tokens of prompts that make trouble: the worker dies when it computes them; starting them fails
#: half of the time, or always, with an error that may pass; no worker can ever run them.
POISON, FLAKY, HOPELESS, UNFIT = 666, 667, 668, 669
_TROUBLE = {POISON: 0.001, FLAKY: 0.02, HOPELESS: 0.003, UNFIT: 0.005}

#: The kinds of process that are killed, paused and cut off.
ROLES = ("worker", "scheduler", "producer")

CRASH_POINTS = {
    "worker": (
        "worker.claimed",
        "worker.before_append",
        "worker.after_append",
        "worker.before_finish",
        "worker.after_finish",
        "worker.before_beat",
        "worker.after_beat",
        "worker.before_nack",
        "worker.after_nack",
    ),
    "scheduler": (
        "scheduler.after_read",
        "scheduler.before_dispatch",
        "scheduler.after_dispatch",
        "scheduler.before_reap",
        "scheduler.after_reap",
        "scheduler.before_promote",
        "scheduler.after_promote",
        "scheduler.before_expire",
        "scheduler.after_expire",
        "scheduler.after_lead",
    ),
    "producer": ("producer.before_submit", "producer.after_submit"),
}

#: Processes that use the library under the name of the previous version, as in an upgrade.
OLD_VERSION = (("worker", 0), ("producer", 1))

#: Fault -> how often it is drawn, relative to the others.
WEIGHTS = {
    "kill_worker": 22,
    "kill_scheduler": 9,
    "kill_producer": 9,
    "kill_redis": 8,
    "pause_worker": 5,
    "pause_scheduler": 3,
    "pause_producer": 2,
    "pause_redis": 3,
    "reset": 8,
    "lose_replies": 6,
    "lose_requests": 3,
    "half_open": 4,
    "delay": 4,
    "hold": 4,
    "slow_fsync": 2,
    "oom": 3,
}
FAULTS = tuple(WEIGHTS)
#: Faults of scenarios of their own, which need another stage or lose what was accepted.
WEIGHTS |= {"promote": 1, "cut_log": 1, "fill_disk": 1}
#: Those that befall the connections of one role alone.
LINK_FAULTS = ("reset", "lose_replies", "lose_requests", "half_open", "delay", "hold")


@dataclass(frozen=True, slots=True)
class JobPlan:
    """One job; ``at`` is its time of submission in seconds after the start.

    ``key`` is its idempotency key or empty.  A ``rival`` producer submits a job with a key as well;
    a ``conflict`` submits another body under the same key and must be refused.  ``follow`` is
    "none", "stream", "reattach" (a stream left and resumed several times) or "result".  A raw job
    comes through the front door, without the SDK.  Times are
    in seconds, 0 for none.
    """

    number: int
    at: float
    producer: int
    prompt: tuple[int, ...]
    num_tokens: int
    tenant: str = TENANTS[0]
    priority: int = 0
    stream: bool = True
    key: str = ""
    rival: int | None = None
    conflict: bool = False
    cancel_after: float | None = None
    follow: str = "none"
    delay: float = 0.0
    deadline: float = 0.0
    max_queue: float = 0.0
    stall: float = 0.0
    batch: str = ""
    is_raw: bool = False

    def has(self, trouble: int) -> bool:
        """Whether the prompt makes this trouble."""
        return trouble in self.prompt[-1:]


@dataclass(frozen=True, slots=True)
class Sweep:
    """A cancellation of a whole batch or, without one, of everything of a tenant."""

    number: int
    at: float
    producer: int
    tenant: str
    batch: str = ""

    def covers(self, job: JobPlan) -> bool:
        """Whether it may end a job."""
        return job.tenant == self.tenant and self.batch in ("", job.batch)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something to break ``at`` seconds after the start, for ``seconds`` where that applies.

    ``choice`` picks the victim among those there are, ``role`` the kind of process or connection.
    """

    at: float
    name: str
    role: str
    choice: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run tries; ``num_jobs`` jobs over ``seconds``, faults all the while."""

    seed: int
    seconds: float
    jobs: tuple[JobPlan, ...]
    faults: tuple[Fault, ...]
    sweeps: tuple[Sweep, ...] = ()
    duplicate_share: float = 0.1
    crash_share: float = 0.3
    skew_share: float = 0.3


def make_plan(
    seed: int,
    num_jobs: int,
    seconds: float,
    faults: Sequence[str] = FAULTS,
    mean_gap: float = 0.6,
) -> Plan:
    """The same plan for the same arguments, in every process."""
    jobs = _make_jobs(random.Random(f"jobs-{seed}"), num_jobs, seconds)
    drawn = _make_faults(random.Random(f"faults-{seed}"), seconds, faults, mean_gap)
    sweeps = _make_sweeps(random.Random(f"sweeps-{seed}"), jobs, seconds)
    return Plan(seed, seconds, tuple(jobs), tuple(drawn), tuple(sweeps))


def _make_jobs(rng: random.Random, num_jobs: int, seconds: float) -> list[JobPlan]:
    prefixes = [_tokens(rng, rng.choice((4, 8, 20, 32))) for _ in range(8)]
    jobs: list[JobPlan] = []
    while len(jobs) < num_jobs:
        # Jobs come in groups that are submitted in one round trip.
        at, producer, tenant = rng.uniform(0, seconds), rng.randrange(NUM_PRODUCERS), _tenant(rng)
        for _ in range(min(rng.randint(1, 12), num_jobs - len(jobs))):
            jobs.append(_make_job(rng, len(jobs), at, producer, tenant, rng.choice(prefixes)))
    return jobs


def _make_sweeps(rng: random.Random, jobs: Sequence[JobPlan], seconds: float) -> list[Sweep]:
    batches = sorted({(job.tenant, job.batch) for job in jobs if job.batch})
    swept = [(tenant, batch) for tenant, batch in batches if rng.random() < 0.2]
    swept += [(TENANTS[-1], "")] * (1 + int(seconds // 20))
    return [
        Sweep(number, rng.uniform(0, seconds), rng.randrange(NUM_PRODUCERS), tenant, batch)
        for number, (tenant, batch) in enumerate(swept)
    ]


def _tenant(rng: random.Random) -> str:
    return rng.choices(TENANTS, (75, 22, 3))[0]


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1000, 40_000) for _ in range(count))


def _make_job(
    rng: random.Random,
    number: int,
    at: float,
    producer: int,
    tenant: str,
    prefix: tuple[int, ...],
) -> JobPlan:
    trouble = rng.choices((0, *_TROUBLE), (1 - sum(_TROUBLE.values()), *_TROUBLE.values()))[0]
    # Its number makes each prompt, and so each output, unlike all others.
    number_ids = (40_000 + number % 9_000, number // 9_000)
    prompt = (*prefix, *_tokens(rng, rng.randrange(8)), *number_ids)
    key = f"k{number}" if rng.random() < 0.9 else ""
    is_cancelled = rng.random() < 0.06 and not trouble
    is_raw = bool(key) and rng.random() < 0.04
    return JobPlan(
        number=number,
        at=at,
        producer=producer,
        prompt=(*prompt, trouble) if trouble else prompt,
        num_tokens=rng.choice((1, 2, 8, 12, 20, 40)),
        tenant=tenant,
        priority=rng.choice((-1, 0, 0, 1)),
        stream=rng.random() < 0.75,
        key=key,
        rival=1 - producer if key and not is_raw and rng.random() < 0.05 else None,
        conflict=bool(key) and not is_raw and rng.random() < 0.02,
        cancel_after=rng.uniform(0.0, 1.5) if is_cancelled else None,
        follow=rng.choices(("none", "stream", "reattach", "result"), (60, 22, 8, 10))[0],
        delay=rng.uniform(0.3, 3.0) if rng.random() < 0.05 else 0.0,
        # A deadline must lie behind the delay.
        deadline=rng.uniform(4.0, 8.0) if rng.random() < 0.03 else 0.0,
        max_queue=rng.uniform(0.3, 2.0) if rng.random() < 0.03 else 0.0,
        stall=rng.uniform(1.0, 3.0) if rng.random() < 0.03 else 0.0,
        batch=f"b{number // 50}" if key and rng.random() < 0.1 else "",
        is_raw=is_raw,
    )


def _make_faults(
    rng: random.Random, seconds: float, names: Sequence[str], mean_gap: float
) -> list[Fault]:
    weights = [WEIGHTS[name] for name in names]
    faults: list[Fault] = []
    at = 1.0 + rng.expovariate(1 / mean_gap)
    while names and at < seconds:
        name = rng.choices(names, weights)[0]
        role = rng.choice(ROLES)
        faults.append(Fault(at, name, role, rng.randrange(1 << 16), _duration(rng, name)))
        at += rng.expovariate(1 / mean_gap)
    return faults


def _duration(rng: random.Random, name: str) -> float:
    match name:
        case "kill_redis":
            return rng.choice((0.0, 0.3, 1.0, 2.0))
        case "pause_worker" | "pause_producer":
            return rng.uniform(1.1, 2.0) * LEASE_SECONDS
        case "pause_scheduler":
            return rng.uniform(1.2, 3.0) * LEADER_LEASE_SECONDS
        case "pause_redis":
            return rng.uniform(0.1, 1.3) * LEASE_SECONDS
        case "hold":
            return rng.uniform(1.0, 2.0) * LEASE_SECONDS
        case _:
            return rng.uniform(0.3, 1.5)
