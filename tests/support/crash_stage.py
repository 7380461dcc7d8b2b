"""A queue with everyone in it who may die, and the judgement of what they leave behind."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import redis

from support.actors import LIVENESS_SECONDS, Actor, Troupe
from support.leaks import find_leaks
from support.recorder import PlannedJob, Record
from support.shard import KEYS, read_log
from support.wait import wait_until
from tidemill.protocol.codec import decode
from tidemill.protocol.messages import JobResult, WorkerStatus
from tidemill.service.runtime import CRASH_STATUS

NUM_JOBS = 4
#: A step so slow that a worker can be caught in mid-generation.
SLOW_SECONDS = 0.03

LEASE_SECONDS = 1.0
LEADER_LEASE_SECONDS = 0.7


@dataclass
class CrashStage:
    """Starts the processes of one test against one server, and checks how their jobs ended."""

    client: redis.Redis
    url: str
    troupe: Troupe
    records: list[Path] = field(default_factory=list)

    def scheduler(
        self,
        *,
        crash_at: str = "",
        url: str = "",
        lease_seconds: float = LEASE_SECONDS,
        options: Sequence[str] = (),
    ) -> Actor:
        """A daemon; the first one leads, the next one is its standby."""
        arguments = ["--redis-url", url or self.url, "--lease-seconds", str(lease_seconds)]
        arguments += ["--leader-lease-seconds", str(LEADER_LEASE_SECONDS), *options]
        return self.troupe.start(
            "tidemill_scheduler.__main__:main", arguments, crash_at=crash_at, name="scheduler"
        )

    def leader(
        self, *, crash_at: str = "", url: str = "", lease_seconds: float = LEASE_SECONDS
    ) -> Actor:
        """A daemon that leads already."""
        epoch = self.epoch
        scheduler = self.scheduler(crash_at=crash_at, url=url, lease_seconds=lease_seconds)
        self.wait_for_epoch(epoch + 1)
        return scheduler

    def worker(
        self,
        *,
        crash_at: str = "",
        url: str = "",
        step_seconds: float = 0.005,
        poison: Sequence[int] = (),
        knows_costs: bool = False,
    ) -> Actor:
        """A worker that takes jobs already."""
        worker = self.troupe.start(
            "support.fake_worker:main",
            url or self.url,
            step_seconds,
            tuple(poison),
            knows_costs,
            crash_at=crash_at,
            name="worker",
        )
        worker.first_line()
        return worker

    def producer(self, jobs: Sequence[PlannedJob], *, crash_at: str = "", url: str = "") -> Actor:
        """A process that submits the jobs, follows them live and ends when they have."""
        self.records.append(self.troupe.directory / f"record-{len(self.records)}.jsonl")
        return self.troupe.start(
            "support.recorder:main",
            url or self.url,
            str(self.records[-1]),
            tuple(jobs),
            crash_at=crash_at,
            name="producer",
        )

    def consumer(self, stream: str, delivered: Path, *, crash_at: str = "") -> Actor:
        """A process that takes what has ended off a tenant's back door."""
        return self.troupe.start(
            "support.back_door:main",
            self.url,
            stream,
            str(delivered),
            crash_at=crash_at,
            name="consumer",
        )

    def knock(self, jobs: Sequence[PlannedJob]) -> list[str]:
        """Put jobs at the front door as a raw producer does; returns their entries."""
        return [
            self.client.xadd(KEYS.front_door, {"v": "1", "body": job.raw_body}).decode()
            for job in jobs
        ]

    def answers(self, jobs: Sequence[PlannedJob], entries: Sequence[str]) -> None:
        """Wait for the answer to each entry, and record that the jobs were accepted."""
        self.records.append(self.troupe.directory / f"record-{len(self.records)}.jsonl")
        with self.records[-1].open("w") as file:
            for job, entry in zip(jobs, entries, strict=True):
                answer = self.client.blpop([KEYS.front_reply(entry)], LIVENESS_SECONDS)
                assert answer is not None, self.logs()
                event = {"kind": "accepted", "key": job.key, "is_new": True}
                print(json.dumps(event | json.loads(answer[1])), file=file)

    @property
    def epoch(self) -> int:
        """The term of the leader so far."""
        return int(self.client.get(KEYS.epoch) or 0)

    def wait_for_epoch(self, epoch: int) -> None:
        """Wait until a later leader leads."""
        wait_until(lambda: self.epoch >= epoch, LIVENESS_SECONDS, f"epoch {epoch}")

    def wait_for_tokens(self, num_tokens: int, num_jobs: int = 1) -> None:
        """Wait until so many jobs have so many tokens in their logs."""
        self.wait(
            lambda: sum(n >= num_tokens for n in self._lengths()) >= num_jobs,
            f"{num_jobs} jobs with {num_tokens} tokens",
        )

    def wait(self, predicate: Callable[[], object], what: str) -> None:
        """Wait for a condition; a failure tells what the processes said last."""
        try:
            wait_until(predicate, LIVENESS_SECONDS, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def state_of(self, job_id: str) -> str:
        """The state of a job."""
        return (self.client.hget(KEYS.job(job_id), "st") or b"gone").decode()

    def status_of(self, worker: Actor) -> WorkerStatus:
        """What a worker has told the scheduler last."""
        entries = self.client.xrevrange(KEYS.status(worker.first_line()), count=1)
        return decode(entries[0][1][b"s"], WorkerStatus) if entries else WorkerStatus()

    def job_ids(self) -> list[str]:
        """All jobs that the server knows."""
        prefix = KEYS.job("")
        return [key.decode().removeprefix(prefix) for key in self.client.scan_iter(f"{prefix}*")]

    def fences(self) -> set[int]:
        """The numbers of the latest attempts of all jobs."""
        return {int(self.client.hget(KEYS.job(job), "f") or 0) for job in self.job_ids()}

    def logs(self) -> str:
        """The last lines of every process."""
        tails = (f"{a.log_path.name}:\n" + "\n".join(a.log.splitlines()[-12:]) for a in self.actors)
        return "\n".join(tails)

    @property
    def actors(self) -> list[Actor]:
        """Everyone who was started, dead or alive."""
        return self.troupe.actors

    def _lengths(self) -> list[int]:
        return [int(self.client.hget(KEYS.job(job), "n") or 0) for job in self.job_ids()]

    def expect_crash(self, actor: Actor) -> None:
        """Wait until an actor has died at its crash point."""
        assert self._end_of(actor) == CRASH_STATUS, self.logs()

    def expect_success(self, *producers: Actor) -> None:
        """Wait until these have seen all their jobs end."""
        for producer in producers:
            assert self._end_of(producer) == 0, self.logs()

    def _end_of(self, actor: Actor) -> int:
        self.wait(lambda: not actor.is_running, f"{actor.log_path.name} ends")
        return actor.wait()

    def judge(self, jobs: Sequence[PlannedJob]) -> dict[str, str]:
        """Check every promise about these jobs, which are all there are; returns ids by key."""
        records = [Record.load(path) for path in self.records]
        ids = _one_id_per_key(records, jobs)
        assert sorted(ids.values()) == sorted(self.job_ids()), "jobs nobody knows of"
        for job in jobs:
            self._judge_job(job, ids[job.key])
            for record in records:
                _judge_reader(job, ids[job.key], record)
        assert int(self.client.hget(KEYS.measures, "e") or 0) == len(jobs), "a job ended twice"
        assert not find_leaks(self.client)
        return ids

    def _judge_job(self, job: PlannedJob, job_id: str) -> None:
        log = read_log(self.client, job_id)
        assert log.terminals == [job.state], job
        assert self.state_of(job_id) == job.state
        assert log.writers == sorted(log.writers), "an older attempt wrote after a newer one"
        assert log.ids == job.oracle[: len(log.ids)]
        if job.state == "done":
            stored = self.client.hget(KEYS.job(job_id), "res")
            assert list(decode(stored, JobResult).ids) == log.ids == job.oracle


def _one_id_per_key(records: Sequence[Record], jobs: Sequence[PlannedJob]) -> dict[str, str]:
    ids: dict[str, set[str]] = {job.key: set() for job in jobs}
    for record in records:
        for key, (job_id, _) in record.accepted.items():
            ids[key].add(job_id)
    assert all(len(found) == 1 for found in ids.values()), f"not one id per key: {ids}"
    return {key: next(iter(found)) for key, found in ids.items()}


def _judge_reader(job: PlannedJob, job_id: str, record: Record) -> None:
    seen: list[int] = []
    for start, ids in record.chunks.get(job_id, []):
        assert start == len(seen), f"a reader saw a gap or a token twice: {record}"
        seen += ids
    assert seen == job.oracle[: len(seen)]
    if job_id in record.ends:
        assert record.ends[job_id] == job.state
        assert job.state != "done" or seen == job.oracle
