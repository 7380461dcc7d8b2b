"""The policies that can be simulated, by name."""

import math
from collections.abc import Callable, Mapping

from tidemill.protocol.errors import InvalidRequest
from tidemill_scheduler.policy.scheduler import Scheduler
from tidemill_scheduler.policy.settings import PolicySettings
from tidemill_scheduler.simulation.baselines.dynamo import DynamoStyle, LmetricStyle
from tidemill_scheduler.simulation.baselines.sglang import SglangStyle
from tidemill_scheduler.simulation.baselines.simple import PrefixHashRing, PullFifo, RoundRobin
from tidemill_scheduler.simulation.policy import Policy


def tidemill(settings: PolicySettings | None = None) -> Scheduler:
    """Return the scheduler of the daemon, for workers that are heard of without heartbeats."""
    return Scheduler(silent_seconds=math.inf, settings=settings or PolicySettings())


#: Name -> how to make a fresh one.
POLICIES: Mapping[str, Callable[[], Policy]] = {
    "tidemill": tidemill,
    "fifo": PullFifo,
    "round-robin": RoundRobin,
    "prefix-hash": PrefixHashRing,
    "sglang-style": SglangStyle,
    "dynamo-style": DynamoStyle,
    "lmetric-style": LmetricStyle,
}


def make_policy(name: str) -> Policy:
    """Return a fresh policy; raises ``InvalidRequest`` for a name that is not in ``POLICIES``."""
    if name not in POLICIES:
        raise InvalidRequest(
            f"policy: there is no {name!r}", field="policy", fix=f"Choose of {', '.join(POLICIES)}."
        )
    return POLICIES[name]()
