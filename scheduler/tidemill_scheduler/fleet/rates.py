"""Rates of events over time, and from them how fast full workers are: pure."""

import math

#: How long a rate remembers; jobs of a minute must not look like a standstill between their ends.
MEMORY_SECONDS = 30.0

#: How fast workers can be changes seldom.
PACE_MEMORY_SECONDS = 120.0


class Rate:
    """An exponentially weighted mean of events per second, unbiased from the first sample on."""

    def __init__(self, known: float = 0.0, memory_seconds: float = MEMORY_SECONDS) -> None:
        self._sum = known
        self._weight = 1.0 if known else 0.0
        self._memory = memory_seconds

    @property
    def per_second(self) -> float:
        """The rate, 0 before the first sample."""
        return self._sum / self._weight if self._weight else 0.0

    def update(self, num_events: float, seconds: float) -> None:
        """Take in what happened in the last ``seconds``."""
        share = 1.0 - math.exp(-seconds / self._memory)
        self._sum += share * (num_events / seconds - self._sum)
        self._weight += share * (1.0 - self._weight)


class Pace:
    """How many jobs would end per second if all workers were full; ``known`` is an earlier pace.

    Workers are full while jobs wait.  What is counted is progress: a job that ended is 1 and one
    that runs 0.5, which is how far they are on average.  So there is a pace before the first of
    many long jobs has ended.  While workers are less full, as after the end of a line, seconds
    count less; those with less than half as many jobs as full ones tell nothing.
    """

    def __init__(self, known: float = 0.0) -> None:
        self._rate = Rate(known, PACE_MEMORY_SECONDS)
        self._num_running = 0
        # Of the jobs that run, those whose halves were counted.
        self._num_credited = 0
        self._num_when_full = 0

    @property
    def per_second(self) -> float:
        """The pace in jobs per second, 0 if it is unknown."""
        return max(0.0, self._rate.per_second)

    def note(self, num_ended: int, num_running: int, seconds: float, *, is_waiting: bool) -> None:
        """Take in how many jobs ended in the last ``seconds``, and whether any waits now."""
        if is_waiting:
            self._num_when_full = num_running
        mean_running = (self._num_running + num_running) / 2
        self._num_running = num_running
        if not self._num_when_full or mean_running < self._num_when_full / 2:
            self._num_credited = min(self._num_credited, num_running)
            return
        progress = num_ended + (num_running - self._num_credited) / 2
        self._num_credited = num_running
        self._rate.update(progress, seconds * min(1.0, mean_running / self._num_when_full))
