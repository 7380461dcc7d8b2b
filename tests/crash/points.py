"""The named points at which processes die in these tests, and the points there are in the code."""

import re
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("producer", "scheduler", "gpuworker")
_CALL = re.compile(r'(?<!\w)crash_point\(\s*f?"([^"]+)"')
#: How a point is spelt that is passed before and after the same call.
_MOMENT = "{moment}"

PRODUCER_POINTS = ("producer.before_submit", "producer.after_submit")

#: Where a leader dies that reads and gives out waiting jobs.
DISPATCH_POINTS = (
    "scheduler.after_lead",
    "scheduler.after_read",
    "scheduler.before_dispatch",
    "scheduler.after_dispatch",
)
REAP_POINTS = ("scheduler.before_reap", "scheduler.after_reap")
PROMOTE_POINTS = ("scheduler.before_promote", "scheduler.after_promote")
EXPIRE_POINTS = ("scheduler.before_expire", "scheduler.after_expire")

FRONT_DOOR_POINTS = ("scheduler.front_after_read", "scheduler.front_after_submit")

#: Where a worker dies in the midst of its jobs; the number is that of the pass.
WORKER_POINTS = (
    "worker.claimed:3",
    "worker.before_append",
    "worker.before_append:4",
    "worker.after_append:4",
    "worker.before_finish",
    "worker.after_finish",
)
BEAT_POINTS = ("worker.before_beat:3", "worker.after_beat:3")
NACK_POINTS = ("worker.before_nack", "worker.after_nack")
RELEASE_POINTS = ("worker.before_release", "worker.after_release")

#: Where whoever makes an attempt dies: the leader, or a worker of the queue.
ATTEMPT_POINTS = (
    "webhooks.before_take",
    "webhooks.after_take",
    "webhooks.before_mark",
    "webhooks.after_mark",
)
#: Where a leader dies between an end and what becomes of it.
OUTBOX_POINTS = ("webhooks.after_read", "webhooks.after_post")
ENQUEUE_POINTS = ("webhooks.before_enqueue", "webhooks.after_enqueue")

#: Where the runner of a batch dies, in the order in which it comes there; a line by its number.
BATCH_POINTS = (
    "batch.after_survey",
    "batch.after_begin:2",
    "batch.line:13",
    "batch.line:20",
    "batch.after_part",
    # Behind it no part may be left: the counts of all of them may be on their way at once.
    "batch.after_count",
    "batch.after_assembly",
    "batch.after_assembly:2",
    "batch.before_end",
    "batch.after_end",
)

ALL_POINTS = (
    *PRODUCER_POINTS,
    *DISPATCH_POINTS,
    *REAP_POINTS,
    *PROMOTE_POINTS,
    *EXPIRE_POINTS,
    *FRONT_DOOR_POINTS,
    *WORKER_POINTS,
    *BEAT_POINTS,
    *NACK_POINTS,
    *RELEASE_POINTS,
    *OUTBOX_POINTS,
    *ENQUEUE_POINTS,
    *ATTEMPT_POINTS,
    *BATCH_POINTS,
)


def points_in_code() -> set[str]:
    """Names that the packages pass to ``crash_point``."""
    names: set[str] = set()
    for source in _SOURCES:
        for path in (_ROOT / source).rglob("*.py"):
            names |= set(_CALL.findall(path.read_text("utf-8")))
    return {name.replace(_MOMENT, moment) for name in names for moment in ("before", "after")}


def name_of(point: str) -> str:
    """A point without the number of its pass."""
    return point.partition(":")[0]
