"""One attempt of a job inside a simulated worker."""

from tidemill.protocol.prefix import ROUTING_STRIDE
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.simulation.workload import unpack_key


class Sequence:
    """Counters of one attempt; its worker changes them."""

    __slots__ = (
        "blocks",
        "chain",
        "command",
        "depth",
        "first_token_at",
        "hit_tokens",
        "input_tokens",
        "is_cancelled",
        "is_delivered",
        "job_id",
        "num_done",
        "number",
        "output_tokens",
        "priority_class",
        "published",
        "tenant",
    )

    def __init__(self, job: WaitingJob, output_tokens: int, number: int, command: str) -> None:
        self.job_id = job.job_id
        self.tenant = job.tenant
        self.priority_class = job.priority_class
        self.chain = unpack_key(job.key)
        self.input_tokens, self.output_tokens = job.cost, output_tokens
        #: Order of dispatch, over all workers.
        self.number = number
        #: The run command of its worker that brings it.
        self.command = command
        #: KV blocks for its whole life, shared ones included.
        self.blocks = 0
        #: Leading hashes it found in the cache when its worker looked last, at its admission at the
        #: latest, and the tokens of them.
        self.depth = 0
        self.hit_tokens = 0
        #: Prompt tokens found or computed.
        self.num_done = 0
        #: Leading hashes it holds.
        self.published = 0
        self.first_token_at = 0.0
        self.is_delivered = False
        self.is_cancelled = False

    @property
    def num_left(self) -> int:
        """Prompt tokens still to be computed."""
        return self.input_tokens - self.num_done

    @property
    def held(self) -> tuple[int, ...]:
        """The hashes it holds a reference to."""
        return self.chain[: self.published]

    @property
    def num_unpublished(self) -> int:
        """KV blocks it holds alone."""
        return self.blocks - self.published * ROUTING_STRIDE
