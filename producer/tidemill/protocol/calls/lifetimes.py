"""How long things live, in ms."""

#: A sealed token log; from then on the stored result serves its readers.
LOG_TTL_MS = 15 * 60 * 1000
#: An ended job with its result, and its idempotency key.
JOB_TTL_MS = 24 * 3600 * 1000
#: A dead job with its request, so that it can be requeued.
DEAD_TTL_MS = 14 * JOB_TTL_MS
#: A model's card, after its last worker's last heartbeat.
MODEL_TTL_MS = 24 * 3600 * 1000
#: A tenant's back door, after its last entry.
BACK_DOOR_TTL_MS = 7 * JOB_TTL_MS
#: The answer to an entry of the front door.
REPLY_TTL_MS = 24 * 3600 * 1000
#: A webhook's delivery, since its last attempt; the index of a tenant's deliveries.
DELIVERY_TTL_MS = 30 * JOB_TTL_MS
