"""How long the output of a tenant's jobs tends to be: pure."""

from collections import OrderedDict
from dataclasses import dataclass

from tidemill_scheduler.intake.jobs import WaitingJob

#: What is expected before any job has finished, in tokens: half of a job's bound, this at most.
DEFAULT_TOKENS = 256

#: So many outputs a mean remembers.
_MEMORY = 32

_MAX_TENANTS = 10_000


@dataclass(slots=True)
class _History:
    count: int = 0
    mean: float = 0.0

    def add(self, tokens: int) -> None:
        """A plain mean at first, then one whose older values fade."""
        self.count += 1
        self.mean += (tokens - self.mean) / min(self.count, _MEMORY)


class OutputLengths:
    """Learns from finished jobs; remembers the tenants that finished jobs last, 10,000 at most.

    A tenant that is not known is taken for the mean of all, so that nobody pays for being new.
    """

    def __init__(self) -> None:
        self._all = _History()
        self._histories: OrderedDict[str, _History] = OrderedDict()

    def __len__(self) -> int:
        return len(self._histories)

    def observe(self, tenant: str, tokens: int) -> None:
        """Note that a job of a tenant ended after so many output tokens."""
        history = self._histories.setdefault(tenant, _History())
        self._histories.move_to_end(tenant)
        history.add(tokens)
        self._all.add(tokens)
        if len(self._histories) > _MAX_TENANTS:
            self._histories.popitem(last=False)

    def expected(self, job: WaitingJob) -> int:
        """Return the mean output of the tenant, at least 1 and within the job's own bound."""
        history = self._histories.get(job.tenant, self._all)
        if not history.count:
            return min(DEFAULT_TOKENS, (job.max_tokens + 1) // 2 or DEFAULT_TOKENS)
        mean = max(1, round(history.mean))
        return min(mean, job.max_tokens) if job.max_tokens else mean
