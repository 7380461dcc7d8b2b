"""A job of the interactive lane, which is bound to a worker but can still move."""

import math

from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.pricing import Price

_UNPRICED = Price(0, 1, 1.0)

#: Jobs whose prefills differ by less than a factor of 2 ** (1 / this) are taken as equal.
_BUCKETS_PER_OCTAVE = 4

#: Added to each wait, so that among new jobs the shorter ones go first.
HEAD_START_SECONDS = 0.02


class BoundJob:
    """A waiting job, where it waits, and what its prefill costs there."""

    __slots__ = ("bucket", "is_hopeless", "job", "key", "number", "planned", "price", "worker_id")

    def __init__(self, job: WaitingJob, number: int) -> None:
        self.job = job
        self.key = job.kv_key
        #: Place in the order of arrival, which it keeps wherever it moves.
        self.number = number
        #: The worker it waits for, None while there is none.
        self.worker_id: str | None = None
        #: What it was expected to cost when it was bound, after those that wait there.
        self.planned = _UNPRICED
        #: What it costs by itself, as far as looked at.
        self.price = _UNPRICED
        self.bucket = 0
        #: Whether its deadline was found out of reach.
        self.is_hopeless = False

    @property
    def latest_start(self) -> float:
        """When its prefill must begin to end by its deadline."""
        return self.job.deadline - self.price.seconds

    def set_price(self, price: Price) -> None:
        """Take in what its prefill costs now."""
        self.price = price
        self.bucket = math.floor(_BUCKETS_PER_OCTAVE * math.log2(price.seconds))

    def ratio(self, now: float) -> float:
        """Return its rank by highest response ratio: seconds waited by seconds of prefill."""
        return (now - self.job.since + HEAD_START_SECONDS) / self.price.seconds
