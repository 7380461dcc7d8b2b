"""What a leader tells of the jobs that wait, for the estimates that submit returns."""

import itertools
import math
import struct
from dataclasses import dataclass
from typing import Self

#: What was told holds for so long, as in the library.
FRESH_MS = 10_000

#: Server time in ms; the rate, then work, jobs, tenants and weight of each class.
_TIME = struct.Struct(">d")
_NUMBERS = struct.Struct(">13d")


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

    def told(self) -> bytes:
        """Return it as ``measure`` takes it: the field ``bk`` of ``thr`` without the time."""
        classes = zip(
            self.work_by_class,
            self.num_jobs_by_class,
            self.num_tenants_by_class,
            self.class_weights,
            strict=True,
        )
        return _NUMBERS.pack(self.tokens_per_second, *itertools.chain.from_iterable(classes))

    @classmethod
    def read(cls, told: bytes | None, now_ms: int) -> Self | None:
        """Read the field ``bk`` of ``thr``; None if it is absent, older than 10 s or damaged."""
        if told is None or len(told) != _TIME.size + _NUMBERS.size:
            return None
        (told_ms,), numbers = _TIME.unpack_from(told), _NUMBERS.unpack_from(told, _TIME.size)
        if not all(map(math.isfinite, numbers)) or not now_ms - told_ms <= FRESH_MS:
            return None
        rate, *values = numbers
        work, jobs, tenants, weights = (values[first::4] for first in range(4))
        return cls(
            work_by_class=(work[0], work[1], work[2]),
            num_tenants_by_class=(int(tenants[0]), int(tenants[1]), int(tenants[2])),
            tokens_per_second=rate,
            num_jobs_by_class=(int(jobs[0]), int(jobs[1]), int(jobs[2])),
            class_weights=(weights[0], weights[1], weights[2]),
        )
