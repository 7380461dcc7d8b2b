"""How webhooks are delivered, beside what the environment says."""

from dataclasses import dataclass

from tidemill_webhooks.http_post import TOTAL_SECONDS

#: An attempt that has taken so long has died with its process.
LEASE_MS = 60_000


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
