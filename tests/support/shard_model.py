"""What must be true of a shard: the promises of the functions, written again without Redis.

Each method stands for one function: it changes the model and returns what the function must reply.
Jobs' limits and delays pass only when a test says so.
"""

from collections import Counter
from dataclasses import dataclass, field

from tidemill.protocol.calls import MAX_CRASHES, NackOutcome

TERMINAL = ("done", "failed", "cancelled", "expired", "dead")
#: In the order in which they are checked.
LIMITS = ("deadline", "queue_timeout", "stalled")
SEAL = 9007199254740991


@dataclass(frozen=True)
class Terms:
    """How a job is submitted."""

    key: str = ""
    digest: str = "-"
    batch: str = ""
    delayed: bool = False
    limits: frozenset[str] = frozenset()
    max_retries: int = 1
    num_tokens: int = 0
    #: Metadata under the name "note".
    note: str = ""


@dataclass
class ModelJob:
    """One job; ``passed`` are the limits whose time is over, ``log`` the ids of its log's entries.

    ``request_bytes`` include those of its metadata, of which there are ``note_bytes``.

    ``due`` is None off the index of limits, else whether the time to look has come.
    """

    job_id: str
    terms: Terms
    request_bytes: int
    note_bytes: int
    state: str
    entry: str = ""
    fence: int = 0
    worker: str = ""
    tokens: int = 0
    tokens_at_dispatch: int = 0
    claimed: int = 0
    crashes: int = 0
    retries: int = 0
    passed: set[str] = field(default_factory=set)
    due: bool | None = None
    log: list[str] = field(default_factory=list)

    @property
    def is_line(self) -> bool:
        """Whether it is a line of a batch object."""
        batch = self.terms.batch
        return bool(batch) and self.terms.key.startswith(f"{batch}:")

    @property
    def waits(self) -> bool:
        """Whether it is counted as queued."""
        return self.state in ("queued", "delayed")

    @property
    def lives(self) -> bool:
        """Whether it can still change."""
        return self.waits or self.state == "run"

    def watches(self, limit: str) -> bool:
        """Whether a limit counts at the moment."""
        if limit not in self.terms.limits:
            return False
        if limit == "queue_timeout":
            return self.waits and self.fence == 0
        return limit == "deadline" or self.state == "run"

    def limit_passed(self) -> str:
        """The first limit that counts and is over."""
        return next((name for name in LIMITS if self.watches(name) and name in self.passed), "")

    def is_owned(self, fence: int, worker: str) -> bool:
        """Whether an attempt may write."""
        return (self.state, self.fence, self.worker) == ("run", fence, worker)


class ShardModel:
    """All jobs and what counts them."""

    def __init__(self) -> None:
        self.jobs: dict[str, ModelJob] = {}
        self.keys: dict[str, tuple[str, str]] = {}
        self.pointers: dict[str, str] = {}
        #: Jobs whose new pointers have no entry id yet.
        self.unbound: list[str] = []
        self.batches: dict[str, Counter[str]] = {}
        self.closed: set[str] = set()
        self.ended: dict[str, str] = {}
        self.num_ended = 0
        self.letters: dict[str, str] = {}
        self.new_letters: list[str] = []
        self.told: list[tuple[str, str, str, int]] = []
        #: Those of them that webhooks hear of.
        self.hooked: list[tuple[str, str, str]] = []
        self.commands: Counter[str] = Counter()
        self.max_jobs = 100
        self.max_tokens = 10_000
        self.epoch = 0

    @property
    def num_live(self) -> int:
        """Jobs that have not ended."""
        return sum(job.lives for job in self.jobs.values())

    @property
    def num_limited(self) -> int:
        """Jobs that have not ended and have time limits."""
        return sum(job.lives and bool(job.terms.limits) for job in self.jobs.values())

    @property
    def states(self) -> set[str]:
        """The states that jobs are in."""
        return {job.state for job in self.jobs.values()}

    def counters(self) -> dict[str, int]:
        """All counters that are not zero."""
        waiting = [job for job in self.jobs.values() if job.waits]
        counts = {
            "q:default": len(waiting),
            "qt:default": sum(job.terms.num_tokens for job in waiting),
            "r:default": sum(job.state == "run" for job in self.jobs.values()),
            "qb": sum(job.request_bytes for job in self.jobs.values() if job.lives),
            "rb": sum(int(member.split()[0]) for member in self.ended),
        }
        return {name: count for name, count in counts.items() if count}

    @property
    def listed(self) -> set[str]:
        """The tenant's jobs that can be listed."""
        return {job_id for job_id, job in self.jobs.items() if not job.is_line}

    def submit(
        self, job_id: str, terms: Terms, request_bytes: int, note_bytes: int
    ) -> tuple[bool, str] | str:
        """Whether it was created and under which id, or the name of the error."""
        if job_id in self.jobs:
            return False, job_id
        if terms.key in self.keys:
            known, digest = self.keys[terms.key]
            return (False, known) if digest == terms.digest else "IdempotencyConflict"
        if terms.batch in self.closed:
            return "BatchClosed"
        counts = self.counters()
        if counts.get("q:default", 0) >= self.max_jobs:
            return "QueueFull"
        waiting = counts.get("qt:default", 0)
        if waiting and waiting + terms.num_tokens > self.max_tokens:
            return "QueueFull"
        job = ModelJob(job_id, terms, request_bytes + note_bytes, note_bytes, "delayed")
        self.jobs[job_id] = job
        if terms.key:
            self.keys[terms.key] = (job_id, terms.digest)
        if terms.batch:
            self.batches.setdefault(terms.batch, Counter())["total"] += 1
        if not terms.delayed:
            self._point(job)
        if any(map(job.watches, LIMITS)):
            job.due = False
        return True, job_id

    def _point(self, job: ModelJob) -> None:
        job.state = "queued"
        self.unbound.append(job.job_id)

    def dispatch(self, job_id: str, entry: str, worker: str, epoch: int) -> tuple[int, str] | str:
        """Fence and state."""
        if epoch != self.epoch:
            return "StaleEpoch"
        job = self.jobs.get(job_id)
        if job and job.state == "queued" and job.limit_passed():
            return 0, "expired"
        self.pointers.pop(entry, None)
        if job is None or job.state != "queued":
            return 0, job.state if job else "gone"
        job.fence += 1
        job.state, job.worker, job.tokens_at_dispatch = "run", worker, job.tokens
        job.passed.discard("stalled")
        if "stalled" in job.terms.limits:
            job.due = bool(job.due)
        job.log.append(f"{job.fence}-{job.tokens}")
        self.commands[worker] += 1
        return job.fence, "run"

    def claim(self, job_id: str, fence: int, worker: str) -> bool:
        """Whether the attempt is the worker's."""
        job = self.jobs.get(job_id)
        if job is None or not job.is_owned(fence, worker):
            return False
        job.claimed = fence
        return True

    def append(self, job_id: str, fence: int, worker: str, start: int, num: int) -> int:
        """1 written, -1 not ours, -2-n at another position."""
        job = self.jobs.get(job_id)
        if job is None or not job.is_owned(fence, worker):
            return -1
        if start != job.tokens:
            return -2 - job.tokens
        job.tokens += num
        job.crashes = 0
        job.passed.discard("stalled")
        job.log.append(f"{fence}-{job.tokens}")
        return 1

    def finish(
        self, job_id: str, fence: int, worker: str, start: int, num: int, result_bytes: int
    ) -> tuple[int, str]:
        """As ``append``, 0 for a job that had ended, and the state after the call."""
        job = self.jobs.get(job_id)
        if job is None:
            return -1, "gone"
        if not job.lives:
            return 0, job.state
        if not job.is_owned(fence, worker):
            return -1, job.state
        if start != job.tokens:
            return -2 - job.tokens, job.state
        job.tokens += num
        self._end(job, "done", "stop", result_bytes)
        return 1, "done"

    def release(self, job_id: str, fence: int, worker: str) -> bool:
        """Whether it was the worker's."""
        job = self.jobs.get(job_id)
        if job is None or not job.is_owned(fence, worker):
            return False
        self._point(job)
        return True

    def nack(self, job_id: str, fence: int, worker: str, *, is_long: bool) -> NackOutcome:
        """A long pause is one that no deadline allows."""
        job = self.jobs.get(job_id)
        if job is None or not job.is_owned(fence, worker):
            return NackOutcome.NOT_OURS
        if job.retries >= job.terms.max_retries:
            self._bury(job)
            return NackOutcome.DEAD
        if "deadline" in job.terms.limits and (is_long or "deadline" in job.passed):
            self._end(job, "expired", "deadline")
            return NackOutcome.EXPIRED
        job.retries += 1
        job.crashes = 0
        job.state = "delayed"
        return NackOutcome.DELAYED

    def promote(self, job_id: str, *, is_ready: bool) -> bool:
        """Whether it may run now."""
        job = self.jobs.get(job_id)
        if job is None or job.state != "delayed" or not is_ready:
            return False
        self._point(job)
        return True

    def reap(self, job_id: str, *, is_lapsed: bool) -> int:
        """1 requeued, 2 dead, 0 neither."""
        job = self.jobs.get(job_id)
        if job is None or job.state != "run" or not is_lapsed:
            return 0
        if job.tokens != job.tokens_at_dispatch:
            job.crashes = 0
        elif job.claimed == job.fence:
            job.crashes += 1
            if job.crashes >= MAX_CRASHES:
                self._bury(job)
                return 2
        self._point(job)
        return 1

    def cancel(self, job_id: str, worker: str) -> tuple[int, str]:
        """Code and state, or the worker that has it."""
        job = self.jobs.get(job_id)
        if job is None:
            return -1, "gone"
        if not job.lives:
            return 0, job.state
        if job.state == "run" and job.worker != worker:
            return -2, job.worker
        self._withdraw(job)
        self._end(job, "cancelled", "cancelled")
        return 1, "cancelled"

    def expire(self, job_id: str, worker: str) -> str:
        """The limit that ended it, "moved", or nothing."""
        job = self.jobs.get(job_id)
        if job is None or not job.due:
            return ""
        if not job.lives:
            job.due = None
            return ""
        limit = job.limit_passed()
        if not limit:
            job.due = False if any(map(job.watches, LIMITS)) else None
            return ""
        if job.state == "run" and job.worker != worker:
            return "moved"
        self._withdraw(job)
        self._end(job, "expired", limit)
        return limit

    def trim(self, member: str) -> int:
        """How many were forgotten."""
        job_id = self.ended.pop(member, None)
        if job_id is None:
            return 0
        if job_id not in self.jobs or not self.jobs[job_id].lives:
            self._forget(job_id)
        return 1

    def drop_letter(self, entry: str, *, with_job: bool) -> bool:
        """Whether it was there."""
        job_id = self.letters.pop(entry, None)
        job = self.jobs.get(job_id or "")
        if job and with_job and job.state == "dead":
            self.ended.pop(self._member(job), None)
            self._forget(job.job_id)
        return job_id is not None

    def close_batch(self, batch: str) -> None:
        """Lets nobody in any more."""
        self.closed.add(batch)
        self.batches.setdefault(batch, Counter())

    def _forget(self, job_id: str) -> None:
        self.jobs.pop(job_id, None)
        self.keys = {key: known for key, known in self.keys.items() if known[0] != job_id}

    def _withdraw(self, job: ModelJob) -> None:
        if job.state == "queued":
            del self.pointers[job.entry]
        if job.state == "run":
            self.commands[job.worker] += 1

    def _bury(self, job: ModelJob) -> None:
        self._end(job, "dead", "error")
        self.new_letters.append(job.job_id)

    def _member(self, job: ModelJob, result_bytes: int = 0) -> str:
        kept = job.request_bytes if job.state == "dead" else job.note_bytes
        return f"{500 + 8 * job.tokens + result_bytes + kept} {job.job_id} default"

    def _end(self, job: ModelJob, state: str, reason: str, result_bytes: int = 0) -> None:
        job.state = state
        job.log.append(f"{SEAL}-{job.tokens}")
        if job.terms.limits:
            job.due = None
        self.ended[self._member(job, result_bytes)] = job.job_id
        self.num_ended += 1
        if job.terms.batch:
            self.batches[job.terms.batch][state] += 1
        self.told.append((job.job_id, state, reason, job.tokens))
        if not job.is_line:
            self.hooked.append((job.job_id, state, reason))
