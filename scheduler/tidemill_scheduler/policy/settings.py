"""What operators can choose about the policy; the defaults come from simulations."""

from dataclasses import dataclass
from typing import Literal

Order = Literal["prefix", "fifo"]


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """How jobs are ordered and shared out; see docs/scheduling.md for what each number does.

    ``order`` "fifo" switches prefix order and lanes off, which is there to be compared with.
    """

    order: Order = "prefix"
    #: Shares of the classes interactive, standard and batch while all of them wait.
    class_weights: tuple[float, float, float] = (8.0, 4.0, 1.0)
    #: Tokens that a class of weight 1 may use in a turn.
    class_quantum: int = 1024
    #: Tokens that a tenant may use in a turn.
    tenant_quantum: int = 2048
    #: An output token counts as so many prompt tokens when tenants are charged.
    output_weight: int = 4
    #: Seconds of waiting work from which on jobs of a class are put in prefix order; the
    #: interactive class never is.
    scan_seconds: tuple[float, float, float] = (float("inf"), 30.0, 2.0)
    #: Waiting jobs from which on they are, whatever the seconds.
    max_bound: tuple[float, float, float] = (float("inf"), 10_000.0, 256.0)
    #: Seconds of the workers' time that the interactive class may use beyond its share before the
    #: others are served first.
    urgent_seconds: float = 10.0
