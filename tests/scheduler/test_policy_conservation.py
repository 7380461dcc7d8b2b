"""Whatever happens, each job goes out once, still waits or was taken away."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from support.played_shard import PlayedShard, PlayedWorker, salted_job
from tidemill_scheduler.fleet.quarantine import SUSPECT_CRASHES
from tidemill_scheduler.policy.scheduler import Scheduler
from tidemill_scheduler.policy.settings import PolicySettings

MODELS = ("m", "n")
#: Holds any job of these tests.
BIG = 1000
SMALL = 50
#: A suspect is tried once its worker has told twice that all it runs produces tokens.
MAX_STALLED_TICKS = 4

paths = st.lists(st.integers(0, 1), max_size=4).map(tuple)


class Conservation(RuleBasedStateMachine):
    """Jobs, workers and time move at random; after each move the books must balance."""

    @initialize(
        order=st.sampled_from(["prefix", "prefix", "prefix", "fifo"]),
        scan=st.sampled_from([0.0, 0.05, 1e9]),
        quantum=st.sampled_from([64, 1024]),
    )
    def begin(self, order: str, scan: float, quantum: int) -> None:
        policy = PolicySettings(
            order=order,  # type: ignore[arg-type]
            scan_seconds=(float("inf"), scan, scan),
            tenant_quantum=quantum,
            class_quantum=quantum,
        )
        scheduler = Scheduler(silent_seconds=5.0, age_seconds=3.0, settings=policy)
        self.shard = PlayedShard(scheduler)

    @rule(
        num=st.integers(1, 8),
        model=st.sampled_from(MODELS),
        tenant=st.integers(0, 2),
        path=paths,
        extra=st.integers(1, 1500),
        priority=st.sampled_from([-2, -1, 0, 0, 1, 1, 4]),
        prefix_id=st.none() | st.integers(0, 1),
        crashes=st.sampled_from([0, 0, 0, 0, 1, SUSPECT_CRASHES]),
    )
    def add(
        self,
        num: int,
        model: str,
        tenant: int,
        path: tuple[int, ...],
        extra: int,
        priority: int,
        prefix_id: int | None,
        crashes: int,
    ) -> None:
        for _ in range(num):
            job = salted_job(
                tenant,
                path,
                extra,
                prefix_id=prefix_id,
                model=model,
                priority=priority,
                crashes=crashes,
                attempts=crashes,
                since=self.shard.now,
            )
            self.shard.add(job)

    @rule(number=st.integers(0, 100))
    def cancel(self, number: int) -> None:
        if self.shard.waiting:
            ids = sorted(self.shard.waiting)
            self.shard.remove(ids[number % len(ids)])

    @rule()
    def tick(self) -> None:
        self.shard.tick()

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.shard.now += seconds

    @rule(
        model=st.sampled_from(MODELS),
        max_num_seqs=st.sampled_from([1, 4, 12]),
        budget=st.sampled_from([128, 512]),
        num_blocks=st.sampled_from([SMALL, BIG, BIG]),
        tells_cache=st.booleans(),
    )
    def join(
        self, model: str, max_num_seqs: int, budget: int, num_blocks: int, tells_cache: bool
    ) -> None:
        if len(self.shard.workers) < 6:
            self.shard.join(
                model,
                tells_cache=tells_cache,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                num_blocks=num_blocks,
            )

    def worker(self, number: int) -> PlayedWorker | None:
        workers = list(self.shard.workers.values())
        return workers[number % len(workers)] if workers else None

    @rule(number=st.integers(0, 5), num=st.integers(0, 6), reads=st.booleans())
    def work(self, number: int, num: int, reads: bool) -> None:
        if worker := self.worker(number):
            self.shard.end(worker, num)
            self.shard.compute(worker, num)
            if reads:
                self.shard.read(worker)
            self.shard.tell(worker)

    @rule(number=st.integers(0, 5))
    def die(self, number: int) -> None:
        if worker := self.worker(number):
            self.shard.die(worker)

    @rule(number=st.integers(0, 5))
    def drain(self, number: int) -> None:
        if worker := self.worker(number):
            worker.is_draining = True
            self.shard.tell(worker)

    @rule(number=st.integers(0, 5))
    def lose_cache(self, number: int) -> None:
        worker = self.worker(number)
        if worker and worker.tells_cache:
            self.shard.forget_cache(worker)

    @rule(number=st.integers(0, 5))
    def tick_and_drop(self, number: int) -> None:
        for dispatch in self.shard.tick()[number:]:
            self.shard.drop(dispatch)

    @invariant()
    def the_books_balance(self) -> None:
        if hasattr(self, "shard"):
            self.shard.check()

    def teardown(self) -> None:
        """With workers that idle nothing waits: each second at least one job goes out."""
        if not hasattr(self, "shard"):
            return
        for model in MODELS:
            self.shard.join(model, num_blocks=BIG, max_num_batched_tokens=512)
        num_stalled = 0
        while self.shard.waiting:
            self.shard.now += 1.0
            for worker in self.shard.workers.values():
                self.shard.finish_all(worker)
            num_stalled = 0 if self.shard.tick() else num_stalled + 1
            self.shard.check()
            assert num_stalled <= MAX_STALLED_TICKS, self.shard.waiting


Conservation.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestConservation = Conservation.TestCase
