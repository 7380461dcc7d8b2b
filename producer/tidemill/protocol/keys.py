"""Every Redis key and channel, by name; ``docs/redis-keys.md`` describes their content."""

from dataclasses import dataclass

from tidemill.protocol.ids import shard_of

#: Consumer group and its only consumer: a fixed name lets a new leader read the old one's PEL.
GROUP = "sched"
CONSUMER = "s"

#: Prefixes of the idempotency keys that Tidemill chooses itself; a caller who took one could block
#: that job.
REQUEUE_KEY, FRONT_KEY = RESERVED_KEYS = ("requeue:", "front:")

#: Keys that live for ever by design; every other key carries a TTL or is emptied by its last job.
_PERMANENT = (
    "act",
    "ak",
    "aku",
    "bw",
    "cfg",
    "cnt",
    "dead",
    "dly",
    "due",
    "ended",
    "ev",
    "front",
    "fx",
    "lib",
    "mds",
    "run",
    "salt",
    "sche",
    "thr",
    "whq",
    "whw",
    "wk",
)
_EMPTIED = ("in:", "bj:", "js:", "wh:", "fs:", "bs:")


@dataclass(frozen=True, slots=True)
class ShardKeys:
    """Key names of one shard; the hash tag keeps them all in one cluster slot."""

    shard: str = "00"

    @property
    def prefix(self) -> str:
        """What all keys of the shard start with."""
        return f"tm:{{{self.shard}}}:"

    def _name(self, rest: str) -> str:
        return f"tm:{{{self.shard}}}:{rest}"

    def job(self, job_id: str) -> str:
        """Hash: the job itself, the only truth about its state."""
        return self._name(f"j:{job_id}")

    def token_log(self, job_id: str) -> str:
        """Stream: the generation's write-ahead log, entry ids ``<fence>-<num tokens>``."""
        return self._name(f"o:{job_id}")

    def token_channel(self, job_id: str) -> str:
        """Pub/sub channel that repeats the token log as it grows."""
        return self._name(f"c:{job_id}")

    def ingress(self, queue: str) -> str:
        """Stream of job pointers of one ``<priority class>:<tenant>``."""
        return self._name(f"in:{queue}")

    @property
    def active_queues(self) -> str:
        """Sorted set: queue name -> ms at which its oldest job began to wait."""
        return self._name("act")

    @property
    def running(self) -> str:
        """Sorted set: job id -> lease expiry in ms; the only crash-recovery index."""
        return self._name("run")

    @property
    def delayed(self) -> str:
        """Sorted set: job id -> ms from which it may run."""
        return self._name("dly")

    @property
    def due(self) -> str:
        """Sorted set: job id -> ms at which a time limit of the job may have passed."""
        return self._name("due")

    @property
    def ended(self) -> str:
        """Sorted set: ``<bytes> <job id>`` of ended jobs -> ms at which they are forgotten."""
        return self._name("ended")

    @property
    def workers(self) -> str:
        """Sorted set: worker id -> heartbeat expiry in ms."""
        return self._name("wk")

    def worker_info(self, worker_id: str) -> str:
        """Hash: what a worker serves and its capacity."""
        return self._name(f"wi:{worker_id}")

    def commands(self, worker_id: str) -> str:
        """Stream: commands to one worker."""
        return self._name(f"w:{worker_id}")

    def status(self, worker_id: str) -> str:
        """Stream: one entry per engine step from one worker."""
        return self._name(f"ws:{worker_id}")

    def kv_snapshot(self, worker_id: str) -> str:
        """String: all that a worker's prefix cache held at some time, as routing hashes."""
        return self._name(f"kv:{worker_id}")

    @property
    def leader(self) -> str:
        """String with expiry: id of the leading scheduler."""
        return self._name("sch")

    @property
    def epoch(self) -> str:
        """String: the leader's term, counted up at each change."""
        return self._name("sche")

    @property
    def counters(self) -> str:
        """Hash: queued and running jobs and queued tokens per tenant, bytes of the shard."""
        return self._name("cnt")

    @property
    def settings(self) -> str:
        """Hash: what operators have set, ``<name>:<tenant>`` or ``<name>:*`` for all others."""
        return self._name("cfg")

    @property
    def measures(self) -> str:
        """Hash: counts of ended jobs, and what the leader has measured from them."""
        return self._name("thr")

    @property
    def libraries(self) -> str:
        """Sorted set: function library -> ms until which a process may still use it."""
        return self._name("lib")

    def rate_buckets(self, tenant: str) -> str:
        """Hash: what is left of a tenant's requests and tokens per minute."""
        return self._name(f"rl:{tenant}")

    def batch(self, tenant: str, batch: str) -> str:
        """Hash: a batch's number of jobs in all and by terminal state."""
        return self._name(f"b:{tenant}:{batch}")

    def batch_members(self, tenant: str, batch: str) -> str:
        """Set: ids of a batch's jobs that have not ended."""
        return self._name(f"bj:{tenant}:{batch}")

    def file(self, tenant: str, file_id: str) -> str:
        """Hash: what is known of a file; its content is in the blob store."""
        return self._name(f"f:{tenant}:{file_id}")

    def jobs(self, tenant: str) -> str:
        """Sorted set: ids of a tenant's jobs, whose order is that of their creation."""
        return self._name(f"js:{tenant}")

    def files(self, tenant: str) -> str:
        """Sorted set: ids of a tenant's files, whose order is that of their creation."""
        return self._name(f"fs:{tenant}")

    def batch_object(self, tenant: str, batch_id: str) -> str:
        """Hash: a batch of OpenAI's API, its state and counts."""
        return self._name(f"bo:{tenant}:{batch_id}")

    def batch_parts(self, tenant: str, batch_id: str) -> str:
        """Hash: the parts of a batch's output that are in the blob store."""
        return self._name(f"bp:{tenant}:{batch_id}")

    def batch_objects(self, tenant: str) -> str:
        """Sorted set: ids of a tenant's batches, whose order is that of their creation."""
        return self._name(f"bs:{tenant}")

    def response(self, tenant: str, job_id: str) -> str:
        """String: what is kept of a response of OpenAI's API beside its job."""
        return self._name(f"rsp:{tenant}:{job_id}")

    @property
    def responses_until(self) -> str:
        """Sorted set: ``<bytes> <tenant> <job>`` of records of responses -> ms of their end."""
        return self._name("rspx")

    @property
    def response_bytes(self) -> str:
        """Hash: what records of responses take, by tenant, ``*`` for all."""
        return self._name("rspb")

    @property
    def active_batches(self) -> str:
        """Sorted set: ``<tenant> <batch id>`` of batches that work -> ms at which they expire."""
        return self._name("bw")

    @property
    def stored_until(self) -> str:
        """Sorted set: ``file|batch <tenant> <id>`` -> ms at which it is forgotten."""
        return self._name("fx")

    @property
    def front_door(self) -> str:
        """Stream of submissions that any client may add to."""
        return self._name("front")

    def front_reply(self, entry_id: str) -> str:
        """List with the one answer to an entry of the front door."""
        return self._name(f"fr:{entry_id}")

    def back_door(self, tenant: str) -> str:
        """Bounded stream of a tenant's ended jobs, for consumer groups of its own."""
        return self._name(f"out:{tenant}")

    @property
    def outbox(self) -> str:
        """Stream of ends that somebody wants to hear of by webhook."""
        return self._name("ev")

    def hooks(self, tenant: str) -> str:
        """Hash: a tenant's webhook endpoints, and what its callbacks are signed with."""
        return self._name(f"wh:{tenant}")

    def delivery(self, delivery_id: str) -> str:
        """Hash: one event on its way to one endpoint."""
        return self._name(f"whd:{delivery_id}")

    @property
    def due_deliveries(self) -> str:
        """Sorted set: delivery -> ms at which somebody must look at it."""
        return self._name("whq")

    def delivery_log(self, tenant: str) -> str:
        """Sorted set: a tenant's deliveries -> ms at which they were made."""
        return self._name(f"whl:{tenant}")

    def deliveries_in_flight(self, tenant: str) -> str:
        """Sorted set: a tenant's deliveries with a running attempt -> the attempt's lease."""
        return self._name(f"whr:{tenant}")

    def circuit(self, name: str) -> str:
        """Hash: how often an endpoint has failed in a row, and until when it is left alone."""
        return self._name(f"whb:{name}")

    @property
    def hook_workers(self) -> str:
        """Sorted set: process that works off the queue of deliveries -> until when it is alive."""
        return self._name("whw")

    @property
    def salts(self) -> str:
        """Hash: tenant -> 16 random bytes mixed into its block hashes."""
        return self._name("salt")

    @property
    def api_keys(self) -> str:
        """Hash: id of an API key -> what it allows and the digest of its secret."""
        return self._name("ak")

    @property
    def api_key_uses(self) -> str:
        """Hash: id of an API key -> ms at which it was used lately, to the minute or so."""
        return self._name("aku")

    def key_bucket(self, key_id: str) -> str:
        """Hash: what is left of an API key's requests per minute."""
        return self._name(f"akr:{key_id}")

    @property
    def dead_letters(self) -> str:
        """Stream: jobs that used up their attempts, and entries nobody could read."""
        return self._name("dead")

    @property
    def bell(self) -> str:
        """Pub/sub channel that wakes the scheduler."""
        return self._name("bell")

    def idempotency(self, tenant: str, key: str) -> str:
        """String: job id and body digest of an idempotency key."""
        return self._name(f"idem:{tenant}:{key}")

    def model(self, name: str) -> str:
        """Hash: the card of a served model."""
        return self._name(f"md:{name}")

    @property
    def models(self) -> str:
        """Sorted set: model name -> ms until which its card is valid."""
        return self._name("mds")

    def tokenizer(self, digest: str) -> str:
        """String: a compressed tokenizer bundle, by digest."""
        return self._name(f"tok:{digest}")


def keys_of(job_id: str) -> ShardKeys:
    """Return the keys of the shard that ``job_id`` names; raises ``InvalidRequest``."""
    return ShardKeys(shard_of(job_id))


def is_permanent(key: bytes) -> bool:
    """Whether ``key`` may live without a TTL."""
    rest = key.decode("utf-8", "replace").partition("}:")[2]
    return rest in _PERMANENT or rest.startswith(_EMPTIED)
