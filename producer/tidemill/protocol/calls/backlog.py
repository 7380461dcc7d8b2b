"""What a leader tells of the jobs that wait, for the estimates that submit returns."""

import math
from dataclasses import dataclass
from typing import Self

from tidemill.protocol.stored import stored_text

#: What was told holds for so long, as in the library.
FRESH_MS = 10_000

_NUM_CLASSES = 3


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits in the classes of priority, the best first, and how fast it goes down.

    ``work_by_class`` and ``tokens_per_second`` are in one unit: tokens to be computed; the rate is
    0 if it is unknown.  ``class_weights`` are the shares of the classes while all of them wait.
    """

    work_by_class: tuple[float, float, float]
    num_tenants_by_class: tuple[int, int, int]
    tokens_per_second: float
    num_jobs_by_class: tuple[int, int, int]
    class_weights: tuple[float, float, float] = (8.0, 4.0, 1.0)

    def told(self) -> str:
        """Return it as ``measure`` takes it: the rate, then of each class what ``thr`` lists."""
        classes = zip(
            self.work_by_class,
            self.num_jobs_by_class,
            self.num_tenants_by_class,
            self.class_weights,
            strict=True,
        )
        told = (
            f"{work:.3f} {jobs} {tenants} {weight:.6g}" for work, jobs, tenants, weight in classes
        )
        return f"{self.tokens_per_second:.6g} {' '.join(told)}"

    @classmethod
    def read(cls, told: bytes | None, now_ms: int) -> Self | None:
        """Read the field ``bk`` of ``thr``; None if it is absent, older than 10 s or damaged."""
        try:
            told_ms, rate, *values = map(float, stored_text(told or b"").split())
        except ValueError:
            return None
        if len(values) != 4 * _NUM_CLASSES or not all(map(math.isfinite, (told_ms, rate, *values))):
            return None
        if now_ms - told_ms > FRESH_MS:
            return None
        work, jobs, tenants, weights = (values[first::4] for first in range(4))
        return cls(
            work_by_class=(work[0], work[1], work[2]),
            num_tenants_by_class=(int(tenants[0]), int(tenants[1]), int(tenants[2])),
            tokens_per_second=rate,
            num_jobs_by_class=(int(jobs[0]), int(jobs[1]), int(jobs[2])),
            class_weights=(weights[0], weights[1], weights[2]),
        )
