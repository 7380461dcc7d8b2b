"""How a worker makes itself known, and how it takes its leave."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import redis

from tidemill.protocol import calls
from tidemill.protocol.calls import Fields
from tidemill.protocol.functions import ensure_library, run
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import ModelCard, WorkerInfo

if TYPE_CHECKING:
    # It loads torch, which is slow and not needed by what decides which sequences run.
    from tidemill_gpuworker.lora.adapters import Adapters

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Registration:
    """What the scheduler and the producers must know of this worker; ``tokenizer`` is a bundle."""

    client: redis.Redis
    keys: ShardKeys
    info: WorkerInfo
    card: ModelCard
    tokenizer: bytes
    lease_ms: int
    adapters: "Adapters | None" = None

    @property
    def current_card(self) -> ModelCard:
        """The model's card with the adapters there are now."""
        if self.adapters is None:
            return self.card
        return self.card.model_copy(update={"adapters": self.adapters.cards})

    def register(self) -> None:
        """Announce the worker, its model and the tokenizer; may be repeated."""
        # A server that forgot the worker, an empty one after a failover, lacks the functions too.
        ensure_library(self.client)
        call = calls.register(
            self.keys,
            info=self.info,
            card=self.current_card,
            tokenizer=self.tokenizer,
            lease_ms=self.lease_ms,
        )
        run(self.client, call)

    def deregister(self, cursor: str) -> list[tuple[bytes, Fields]]:
        """Take the worker out; returns the commands after ``cursor`` that nobody has read."""
        call = calls.deregister(self.keys, worker_id=self.info.worker_id, cursor=cursor)
        return run(self.client, call)
