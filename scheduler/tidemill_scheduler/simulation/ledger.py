"""Counts what happens in a simulation, cheaply enough for ten million jobs."""

from array import array
from collections import defaultdict
from collections.abc import Iterable

from tidemill_scheduler.simulation.member import Attempt
from tidemill_scheduler.simulation.sequence import Sequence

#: An output token counts as so many prompt tokens in a tenant's service.
OUTPUT_WEIGHT = 4

#: Beyond so many tenants the pairs would cost more than the simulation.
MAX_COMPARED_TENANTS = 64


class ServiceGap:
    """The most by which one tenant was served more than another while both had jobs waiting.

    Service is uncached prompt tokens plus ``OUTPUT_WEIGHT`` times the output tokens, counted when a
    worker admits the job.  For each pair the difference of service may start anywhere, so the gap
    is the range it covers while both stay backlogged.
    """

    def __init__(self) -> None:
        self._waiting: defaultdict[str, int] = defaultdict(int)
        self._service: defaultdict[str, int] = defaultdict(int)
        self._ranges: dict[tuple[str, str], tuple[int, int]] = {}
        self._most = 0
        self._is_followed = True

    @property
    def most(self) -> int | None:
        """The gap in tokens; None with one tenant or too many."""
        is_known = self._is_followed and len(self._waiting) > 1
        return self._most if is_known else None

    def waits(self, tenant: str) -> None:
        """A job of the tenant began to wait."""
        self._waiting[tenant] += 1
        if self._is_followed and len(self._waiting) > MAX_COMPARED_TENANTS:
            self._is_followed = False
            self._ranges.clear()

    def leaves(self, tenant: str) -> None:
        """A job of the tenant waits no more."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            self._ranges = {pair: seen for pair, seen in self._ranges.items() if tenant not in pair}

    def served(self, tenant: str, tokens: int) -> None:
        """Add to a tenant's service."""
        if not self._is_followed or len(self._waiting) < 2:
            return
        before = self._service[tenant]
        self._service[tenant] = before + tokens
        if not self._waiting[tenant]:
            return
        for other, count in self._waiting.items():
            if count and other != tenant:
                self._compare(tenant, other, before)

    def _compare(self, tenant: str, other: str, before: int) -> None:
        sign, pair = (1, (tenant, other)) if tenant < other else (-1, (other, tenant))
        new = sign * (self._service[tenant] - self._service[other])
        old = sign * (before - self._service[other])
        low, high = self._ranges.get(pair, (old, old))
        low, high = min(low, new), max(high, new)
        self._ranges[pair] = (low, high)
        self._most = max(self._most, high - low)


class ClassTimes:
    """Times of the finished jobs of one class, in seconds."""

    def __init__(self) -> None:
        self.ttft = array("d")
        self.tpot = array("d")
        self.wait = array("d")
        self.last_end = 0.0


class Ledger:
    """Sums and times of one run."""

    def __init__(self) -> None:
        self.times: defaultdict[int, ClassTimes] = defaultdict(ClassTimes)
        self.gap = ServiceGap()
        self.num_jobs = 0
        self.num_finished = 0
        self.num_cancelled = 0
        #: Prompt tokens of the finished jobs, and output tokens.
        self.input_tokens = 0
        self.output_tokens = 0
        #: Attempts that came to nothing.
        self.abandoned: list[Sequence] = []
        self.num_requeued = 0
        self.num_fenced = 0
        self.num_ticks = 0
        self.num_events = 0
        self.num_dispatches = 0

    @property
    def num_open(self) -> int:
        """Jobs that were submitted and have not ended."""
        return self.num_jobs - self.num_finished - self.num_cancelled

    def admitted(self, sequences: Iterable[Sequence]) -> None:
        """Count the service of sequences that a worker has just admitted."""
        for seq in sequences:
            uncached = seq.input_tokens - seq.hit_tokens
            self.gap.served(seq.tenant, uncached + OUTPUT_WEIGHT * seq.output_tokens)

    def finished(self, attempt: Attempt, now: float) -> None:
        """Count a job whose attempt has produced its last token."""
        job, seq = attempt.job, attempt.sequence
        assert seq is not None
        self.num_finished += 1
        self.input_tokens += seq.input_tokens
        self.output_tokens += seq.output_tokens
        times = self.times[seq.priority_class]
        times.ttft.append(seq.first_token_at - job.since)
        times.wait.append(attempt.dispatched_at - job.since)
        if seq.output_tokens > 1:
            times.tpot.append((now - seq.first_token_at) / (seq.output_tokens - 1))
        times.last_end = now
