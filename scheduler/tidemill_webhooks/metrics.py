"""What deliveries count; served by the process that makes them."""

from prometheus_client import Counter, Gauge, Histogram

EVENTS = Counter("tidemill_webhook_events_total", "Events taken from the outbox", ["type"])
UNREADABLE = Counter(
    "tidemill_webhook_unreadable_total", "Entries of the outbox that stood for nothing"
)
POSTED = Counter("tidemill_webhook_deliveries_total", "Deliveries made of events")
ATTEMPTS = Counter("tidemill_webhook_attempts_total", "Attempts by outcome", ["outcome"])
ATTEMPT_SECONDS = Histogram(
    "tidemill_webhook_attempt_seconds",
    "Time of one attempt, from resolving the name to the answer",
    buckets=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 20.0),
)
POSTPONED = Counter(
    "tidemill_webhook_postponed_total", "Due deliveries that had to wait, by reason", ["reason"]
)
SWITCHED_OFF = Counter("tidemill_webhook_switched_off_total", "Endpoints that answered 410 Gone")
HANDED = Counter("tidemill_webhook_handed_total", "Attempts left to the workers of the queue")
PENDING = Gauge("tidemill_webhook_pending", "Deliveries that have not ended")
WORKERS = Gauge("tidemill_webhook_workers", "Workers of the queue that are there")
