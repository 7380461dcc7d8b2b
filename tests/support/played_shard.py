"""A scheduler with workers that a test moves: it says what they hold, tell, lose and cache."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from support.waiting_jobs import key_of, make_job
from tidemill.protocol.messages import (
    FinishedSequence,
    KvEvents,
    KvSnapshot,
    WorkerInfo,
    WorkerStatus,
)
from tidemill.protocol.prefix import ROUTING_HASH_BYTES
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.placement import Dispatch
from tidemill_scheduler.policy.scheduler import Scheduler

BLOCK_SIZE = 16
#: Tokens that a routing hash stands for.
TOKENS = 64
SILENT_SECONDS = 5.0


def make_info(name: str, model: str = "m", **limits: int) -> WorkerInfo:
    """A worker with room for nearly everything, unless ``limits`` say else."""
    defaults = {"num_blocks": 100_000, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
    return WorkerInfo.model_validate(
        {"worker_id": name, "model": model, "wire_version": 1, **defaults, **limits}
    )


def salted_key(tenant: int, path: tuple[int, ...], prefix_id: int | None = None) -> bytes:
    """Keys of two tenants share nothing; a prefix id stands before what stands for tokens."""
    key = b"" if prefix_id is None else key_of((1000 + tenant, prefix_id))[-ROUTING_HASH_BYTES:]
    return key + key_of((tenant, *path))


def digests_of(key: bytes) -> Iterator[bytes]:
    """The routing hashes of a key."""
    return (key[i : i + ROUTING_HASH_BYTES] for i in range(0, len(key), ROUTING_HASH_BYTES))


def is_within_credit(ahead: Collection[int], budget: int) -> bool:
    """Whether a worker whose round trips were not measured may have prompts of these tokens ahead.

    They fit into two steps of ``budget`` tokens, or the largest came behind less than one of them.
    """
    tokens = sum(ahead)
    return tokens <= 2 * budget or tokens - max(ahead) < budget


@dataclass
class PlayedWorker:
    """What a worker really holds: commands not read, prompts not computed, sequences running."""

    info: WorkerInfo
    tells_cache: bool = False
    unread: list[Dispatch] = field(default_factory=list)
    waiting: list[Dispatch] = field(default_factory=list)
    running: list[Dispatch] = field(default_factory=list)
    finished: list[FinishedSequence] = field(default_factory=list)
    last_command: str = "0-0"
    is_draining: bool = False
    cached: set[bytes] = field(default_factory=set)
    seq: int = 0

    @property
    def held(self) -> list[Dispatch]:
        """All jobs that are its own."""
        return self.unread + self.waiting + self.running

    def check(self) -> None:
        """It was never given more than its credit."""
        # Interactive jobs have credit of their own, for they go before the others.
        for is_urgent in (False, True):
            ahead = [d.tokens for d in self.unread + self.waiting if _is_urgent(d) == is_urgent]
            assert is_within_credit(ahead, self.info.max_num_batched_tokens)
        assert len(self.held) <= self.info.max_num_seqs + max(1, self.info.max_num_seqs // 8)

    def status(self) -> WorkerStatus:
        """Its account of itself; each end is told once."""
        finished, self.finished = self.finished, []
        held = sum(-(-d.job.cost // BLOCK_SIZE) + 1 for d in self.waiting + self.running)
        return WorkerStatus(
            last_command=self.last_command,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            waiting_tokens=sum(dispatch.tokens for dispatch in self.waiting),
            urgent_tokens=sum(d.tokens for d in self.waiting if _is_urgent(d)),
            free_blocks=max(0, self.info.num_blocks - held),
            draining=self.is_draining,
            finished=tuple(finished),
        )


class PlayedShard:
    """Keeps its own account of which jobs wait, and compares it with the scheduler's."""

    def __init__(self, scheduler: Scheduler | None = None) -> None:
        self.scheduler = scheduler or Scheduler(silent_seconds=SILENT_SECONDS)
        self.now = 0.0
        self.workers: dict[str, PlayedWorker] = {}
        self.waiting: dict[str, WaitingJob] = {}
        self.num_given: Counter[str] = Counter()
        self._num_commands = 0
        self._num_names = 0

    def join(self, model: str = "m", *, tells_cache: bool = False, **limits: int) -> PlayedWorker:
        """A new worker."""
        self._num_names += 1
        info = make_info(f"w{self._num_names}", model, **limits)
        worker = self.workers[info.worker_id] = PlayedWorker(info, tells_cache)
        self.scheduler.add_worker(info, self.now)
        if tells_cache:
            self.scheduler.reset_kv(info.worker_id, KvSnapshot(seq=0))
        return worker

    def add(self, job: WaitingJob) -> None:
        """A job comes."""
        self.waiting[job.job_id] = job
        self.scheduler.add_job(job)

    def remove(self, job_id: str) -> None:
        """A job is cancelled."""
        del self.waiting[job_id]
        assert self.scheduler.forget(job_id)

    def tick(self) -> list[Dispatch]:
        """Let everything out that can go."""
        dispatches = []
        while True:
            some = self.scheduler.tick(self.now)
            for dispatch in some:
                self._give(dispatch)
            dispatches += some
            assert len(dispatches) <= 10_000
            if not (some and self.scheduler.is_unfinished):
                return dispatches

    def drop(self, dispatch: Dispatch) -> None:
        """A job that was given out turns out to have been cancelled."""
        worker = self.workers[dispatch.worker_id]
        worker.unread.remove(dispatch)
        self.scheduler.dropped(dispatch)

    def read(self, worker: PlayedWorker) -> None:
        """A worker reads its commands, all at once."""
        worker.waiting += worker.unread
        worker.unread = []
        worker.last_command = f"1-{self._num_commands}"

    def compute(self, worker: PlayedWorker, num: int) -> None:
        """A worker prefills up to ``num`` jobs."""
        done, worker.waiting = worker.waiting[:num], worker.waiting[num:]
        worker.running += done
        fresh = {digest for d in done for digest in digests_of(d.job.kv_key)} - worker.cached
        worker.cached |= fresh
        if fresh and worker.tells_cache:
            worker.seq += 1
            events = KvEvents(seq=worker.seq, stored=b"".join(fresh))
            assert self.scheduler.apply_kv(worker.info.worker_id, events)

    def end(self, worker: PlayedWorker, num: int) -> None:
        """A worker ends up to ``num`` of its jobs, each after one token."""
        done, worker.running = worker.running[:num], worker.running[num:]
        worker.finished += [
            FinishedSequence(
                job_id=d.job.job_id, cached_tokens=max(0, d.job.cost - d.tokens), output_tokens=1
            )
            for d in done
        ]

    def tell(self, worker: PlayedWorker) -> None:
        """A worker's status arrives."""
        self.scheduler.update_worker(worker.info.worker_id, worker.status(), self.now)

    def finish_all(self, worker: PlayedWorker) -> None:
        """A worker reads, computes and ends all that it has, and tells so."""
        self.read(worker)
        self.compute(worker, len(worker.waiting))
        self.end(worker, len(worker.running))
        self.tell(worker)

    def forget_cache(self, worker: PlayedWorker) -> None:
        """A worker's cache is emptied; what it told of that is lost, and its snapshot is read."""
        worker.cached = set()
        worker.seq += 2
        name = worker.info.worker_id
        assert not self.scheduler.apply_kv(name, KvEvents(seq=worker.seq))
        self.scheduler.reset_kv(name, KvSnapshot(seq=worker.seq))

    def die(self, worker: PlayedWorker) -> list[WaitingJob]:
        """A worker is gone, and what it held comes back; returns that."""
        name = worker.info.worker_id
        del self.workers[name]
        self.scheduler.remove_worker(name)
        returned = [
            replace(
                dispatch.job,
                attempts=dispatch.job.attempts + 1,
                last_worker=name,
                entry_id=f"1800000000000-{self._num_commands + number}",
            )
            for number, dispatch in enumerate(worker.held)
        ]
        self._num_commands += len(returned)
        for job in returned:
            self.num_given[job.job_id] -= 1
            self.add(job)
        return returned

    def check(self) -> None:
        """Every job waits or was given out once, and nobody has more than its credit."""
        assert set(self.scheduler.waiting_ids) == set(self.waiting)
        assert all(num in (0, 1) for num in self.num_given.values())
        for worker in self.workers.values():
            worker.check()

    def _give(self, dispatch: Dispatch) -> None:
        job, worker = dispatch.job, self.workers[dispatch.worker_id]
        assert self.waiting.pop(job.job_id) is job, "it does not wait"
        assert worker.info.model == job.model and not worker.is_draining
        assert 1 <= dispatch.tokens <= max(1, job.cost)
        self.num_given[job.job_id] += 1
        self._num_commands += 1
        worker.unread.append(dispatch)
        self.scheduler.sent(dispatch, f"1-{self._num_commands}")


def _is_urgent(dispatch: Dispatch) -> bool:
    return dispatch.job.priority_class == 0


def salted_job(
    tenant: int = 0,
    path: tuple[int, ...] = (),
    extra: int = 36,
    *,
    prefix_id: int | None = None,
    **values: object,
) -> WaitingJob:
    """A job whose prompt is a path of a tenant's own tree, and ``extra`` tokens."""
    key = salted_key(tenant, path, prefix_id)
    plain = make_job(cost=TOKENS * (1 + len(path)) + extra)
    hint_depth = int(prefix_id is not None)
    job = replace(plain, key=key, queue=f"p1:t{tenant}", hint_depth=hint_depth, max_tokens=1)
    return replace(job, **values)  # type: ignore[arg-type]
