"""What is simulated: the workers and what happens to them."""

import random
from dataclasses import dataclass

from tidemill.protocol.errors import ConfigError
from tidemill.protocol.step_cost import StepCost

_DEFAULT_COST = StepCost()
_DURATIONS = (
    "rtt_seconds",
    "kv_lag_seconds",
    "tpot_slo_seconds",
    "tick_seconds",
    "heartbeat_seconds",
)

#: The most of each, far above any worker; within them no sum loses its small parts.
MAX_KV_TOKENS = 10**12
MAX_STEP_TOKENS = 10**8
MAX_SECONDS = 3600.0

#: Clocks that count from zero still tell steps of this length apart after ten days.
MIN_STEP_SECONDS = 1e-9


def check_cost(cost: StepCost) -> None:
    """Raise ``ConfigError`` unless every step takes some time, and none takes years."""
    for name, value in cost.model_dump().items():
        if not 0 <= value <= MAX_SECONDS:
            raise ConfigError(f"cost: {name}: {value:g} is not from 0 to {MAX_SECONDS:,.0f} s")
    if cost.base + cost.per_token + cost.per_context < MIN_STEP_SECONDS:
        raise ConfigError(
            "cost: base + per_token + per_context, a step that decodes one token, is below"
            f" {MIN_STEP_SECONDS:g} s",
            fix="Set base to the seconds that any step takes.",
        )


@dataclass(frozen=True, slots=True)
class Cluster:
    """Workers of one kind; the defaults are one GPU of 80 GB with 8B weights in bf16 each.

    ``step_tokens`` is the token budget of a step, ``rtt_seconds`` what passes between a dispatch
    and its arrival plus what passes on the way back.  KV events arrive up to ``kv_lag_seconds``
    late, by a delay that each worker keeps.  ``watermark`` of the KV cache stays free while
    anything runs, and the batch class is admitted up to ``batch_ceiling`` of it.  Its decodes are
    left out of steps that prefill for the interactive class, ``max_paused_steps`` in a row at most
    (0: none).  With ``tick_seconds`` decisions wait for the next multiple of it; with
    ``heartbeat_seconds`` idle workers report so often.  At most ``max_waiting`` jobs of bulk
    workloads wait in the policy.
    """

    num_workers: int
    kv_tokens: int = 437_000
    step_tokens: int = 8192
    max_seqs: int = 256
    cost: StepCost = _DEFAULT_COST
    rtt_seconds: float = 0.0
    kv_lag_seconds: float = 0.0
    publish_at_schedule: bool = True
    tpot_slo_seconds: float = 0.0
    watermark: float = 0.01
    batch_ceiling: float = 0.85
    max_paused_steps: int = 64
    macro_steps: bool = True
    hints: bool = True
    tick_seconds: float = 0.0
    heartbeat_seconds: float = 0.0
    max_waiting: int = 1_000_000
    model: str = "sim"

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_durations()
        check_cost(self.cost)
        if self.max_paused_steps < 0:
            raise ConfigError(
                f"max_paused_steps: {self.max_paused_steps} is negative",
                fix="Give the steps that the batch class may be left out of, or 0 for none.",
            )
        if not 0 <= self.watermark < self.batch_ceiling <= 1:
            raise ConfigError(
                f"batch_ceiling: {self.batch_ceiling} is not between the watermark and 1",
                fix="Give shares such as watermark 0.01 and batch_ceiling 0.85.",
            )

    def _check_counts(self) -> None:
        for name in ("num_workers", "kv_tokens", "step_tokens", "max_seqs", "max_waiting"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}: {value} is below 1", fix="Give 1 or more.")
        for name, most in (("kv_tokens", MAX_KV_TOKENS), ("step_tokens", MAX_STEP_TOKENS)):
            if getattr(self, name) > most:
                raise ConfigError(f"{name}: it is above {most:,}", fix="Give at most that.")

    def _check_durations(self) -> None:
        for name in _DURATIONS:
            value = getattr(self, name)
            if not 0 <= value <= MAX_SECONDS:
                raise ConfigError(
                    f"{name}: {value:g} is no duration from 0 to {MAX_SECONDS:,.0f} s",
                    fix="Give seconds within these bounds.",
                )


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, and when, in seconds of the simulation; workers are named by number.

    A worker of ``deaths`` stops; one of ``silences`` is not heard of any more but goes on, so that
    its late results must be refused.  Both are found out after ``detect_seconds``.  At each time of
    ``joins`` another worker comes.  ``cancels`` names jobs by their number in the order in which
    the simulation submits them.
    """

    deaths: tuple[tuple[float, int], ...] = ()
    silences: tuple[tuple[float, int], ...] = ()
    joins: tuple[float, ...] = ()
    cancels: tuple[tuple[float, int], ...] = ()
    detect_seconds: float = 3.0

    @classmethod
    def random_deaths(cls, num_workers: int, share: float, *, within: float, seed: int) -> "Faults":
        """Let this share of the workers die at random times of the first ``within`` seconds."""
        rng = random.Random(seed)
        victims = rng.sample(range(num_workers), round(share * num_workers))
        return cls(deaths=tuple(sorted((rng.uniform(0, within), victim) for victim in victims)))
