"""The scheduler without prefix order, lanes and shares: what others are compared with."""

from dataclasses import replace
from pathlib import Path

import pytest

from support.shard import KEYS
from support.waiting_jobs import make_job
from tidemill.protocol.errors import ConfigError
from tidemill.protocol.messages import WorkerInfo, WorkerStatus
from tidemill.service.config import ServiceConfig
from tidemill.service.redis import connect_async
from tidemill.service.tokenizer_cache import AsyncRedisTokenizers, TokenizerStore
from tidemill_scheduler import term
from tidemill_scheduler.config import SchedulerConfig, parse_arguments
from tidemill_scheduler.fleet.grace import Grace
from tidemill_scheduler.health import Health
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.leadership import Leadership
from tidemill_scheduler.policy.scheduler import Scheduler
from tidemill_scheduler.policy.settings import PolicySettings

SERVICE = ServiceConfig("redis://nowhere", Path(), Path(), None, 1, "INFO", 10.0, 1.0)


def make_scheduler(*names: str, max_num_seqs: int = 1) -> Scheduler:
    scheduler = Scheduler(silent_seconds=5.0, settings=PolicySettings(order="fifo"))
    for name in names:
        info = WorkerInfo(
            worker_id=name,
            model="m",
            num_blocks=1000,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=1000,
            wire_version=1,
        )
        scheduler.add_worker(info, 0.0)
    return scheduler


def add(scheduler: Scheduler, *jobs: WaitingJob) -> list[str]:
    for job in jobs:
        scheduler.add_job(job)
    return [job.job_id for job in jobs]


def drain(scheduler: Scheduler, *names: str) -> list[str]:
    """Let all jobs out; whoever got some has ended them a second later."""
    given: list[str] = []
    for second in range(scheduler.num_waiting + 1):
        for dispatch in scheduler.tick(float(second)):
            given.append(dispatch.job.job_id)
            scheduler.sent(dispatch, f"1-{len(given)}")
        for name in names:
            status = WorkerStatus(last_command=f"1-{len(given)}", free_blocks=1000)
            scheduler.update_worker(name, status, second + 0.5)
    return given


def test_jobs_go_in_the_order_they_came_whatever_they_share_and_whosever_they_are() -> None:
    scheduler = make_scheduler("a")
    labels = [3, 1, 2, 1, 3, 2, 1]
    jobs = [make_job((label, label, label), cost=200) for label in labels]
    tenants = [replace(job, queue=f"p1:{n % 2}") for n, job in enumerate(jobs)]
    ids = add(scheduler, *tenants)

    assert drain(scheduler, "a") == ids


def test_jobs_that_were_given_back_go_first_and_then_the_lower_integer() -> None:
    scheduler = make_scheduler("a")
    ids = add(
        scheduler,
        *(make_job(priority=priority) for priority in (5, 0, -1, -5)),
        make_job(priority=9, attempts=1),
    )

    assert drain(scheduler, "a") == ids[::-1]


def test_every_job_goes_out_once_and_none_that_was_removed() -> None:
    scheduler = make_scheduler("a", "b", max_num_seqs=3)
    ids = add(scheduler, *(make_job((n % 4,), cost=300, priority=n % 3 - 1) for n in range(60)))
    for job_id in ids[::7]:
        scheduler.remove_job(job_id)

    assert sorted(drain(scheduler, "a", "b")) == sorted(set(ids) - set(ids[::7]))
    assert scheduler.num_waiting == 0


def test_the_option_chooses_the_order() -> None:
    assert parse_arguments([], SERVICE).policy == "prefix"
    assert parse_arguments(["--policy", "fifo"], SERVICE).policy == "fifo"
    with pytest.raises(ConfigError, match="--policy"):
        parse_arguments(["--policy", "lifo"], SERVICE)


@pytest.mark.parametrize("policy", ["prefix", "fifo"])
async def test_a_term_orders_as_it_is_told(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[str] = []

    class Spy(Scheduler):
        def __init__(self, *, settings: PolicySettings, **values: object) -> None:
            super().__init__(settings=settings, **values)  # type: ignore[arg-type]
            orders.append(settings.order)

    monkeypatch.setattr(term, "Scheduler", Spy)
    config = SchedulerConfig("redis://nowhere", policy=policy)  # type: ignore[arg-type]
    async with connect_async("redis://127.0.0.1:1", retries=0) as client:
        leadership = Leadership(client, KEYS, "scheduler", 1.0)
        tokenizers = AsyncRedisTokenizers(KEYS, TokenizerStore())
        term.Term(client, KEYS, config, leadership, tokenizers, Health(), Grace(1.0))

    assert orders == [policy]
