"""How webhooks are delivered, beside what the environment says."""

from dataclasses import dataclass

from tidemill_webhooks.http_post import TOTAL_SECONDS

#: What an attempt needs beside its own time: to be noted, at a broker that is slow.
_MARGIN_SECONDS = 5.0
#: An attempt that has taken so long has died with its process.  Until then it counts among those of
#: its tenant, whose others wait if all of them have died.
LEASE_MS = round((TOTAL_SECONDS + _MARGIN_SECONDS) * 1000)


@dataclass(frozen=True, slots=True)
class DeliverySettings:
    """``allow_private`` opens http, any port and any address, for development.

    ``operator_secret`` signs callbacks of tenants that have no secret of their own.  A tenant has
    at most ``max_in_flight`` attempts at once, and others wait ``pause_ms`` then.
    """

    allow_private: bool = False
    operator_secret: str = ""
    max_in_flight: int = 8
    pause_ms: int = 1_000
    lease_ms: int = LEASE_MS
    total_seconds: float = TOTAL_SECONDS
