"""What the scheduler counts; served by ``tidemill.service.metrics``."""

from prometheus_client import Counter, Gauge, Histogram

LEADER = Gauge("tidemill_scheduler_leader", "1 while this process leads its shard, else 0")
EPOCH = Gauge("tidemill_scheduler_epoch", "Term of the leader, as last seen by this process")
WAITING_JOBS = Gauge("tidemill_scheduler_waiting_jobs", "Jobs read and not dispatched")
UNTOKENIZED_JOBS = Gauge("tidemill_scheduler_untokenized_jobs", "Text jobs not tokenised yet")
WORKERS = Gauge("tidemill_scheduler_workers", "Registered workers")

DISPATCHED = Counter("tidemill_scheduler_dispatched_total", "Jobs given to a worker")
NOT_QUEUED = Counter(
    "tidemill_scheduler_not_queued_total", "Dispatches of jobs that were not queued any more"
)
LOST_HINTS = Counter("tidemill_scheduler_lost_hints_total", "Hints that the server refused")
KV_GAPS = Counter(
    "tidemill_scheduler_kv_gaps_total",
    "Times that a worker's prefix cache was read anew, because events of it were missing",
)
FORGOTTEN = Counter(
    "tidemill_scheduler_forgotten_total", "Waiting jobs that were found cancelled or lost"
)
REAPED = Counter("tidemill_scheduler_reaped_total", "Jobs whose lease ran out", ["outcome"])
PROMOTED = Counter("tidemill_scheduler_promoted_total", "Delayed jobs whose time to run has come")
EXPIRED = Counter(
    "tidemill_scheduler_expired_total", "Jobs that a time limit ended, by limit", ["reason"]
)
TRIMMED = Counter(
    "tidemill_scheduler_trimmed_total",
    "Ended jobs forgotten, because their time is over or because all take too many bytes",
    ["reason"],
)
MALFORMED = Counter("tidemill_scheduler_malformed_total", "Pointers moved to the dead letters")
FRONT = Counter(
    "tidemill_scheduler_front_door_total", "Entries of raw producers handled", ["outcome"]
)
FRONT_WAITING = Gauge(
    "tidemill_scheduler_front_door_waiting", "Entries that wait for room, a rate or a model"
)
TOKENIZED = Counter("tidemill_scheduler_tokenized_total", "Text jobs tokenised", ["outcome"])
RESTARTS = Counter("tidemill_scheduler_restarts_total", "Terms that an error ended", ["reason"])

TICK_SECONDS = Histogram(
    "tidemill_scheduler_tick_seconds",
    "Time of one scheduling decision",
    buckets=(0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
)
