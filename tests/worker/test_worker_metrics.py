"""What a worker tells Prometheus."""

import threading
from collections.abc import Sequence

import pytest
import redis
from prometheus_client import REGISTRY

from support import shard
from support.wait import wait_until
from support.worker_rig import Rig, make_request
from tidemill.protocol.calls import Written
from tidemill_gpuworker.shell.inbox import Cancelled
from tidemill_gpuworker.shell.outbox import Write

UNITS = (
    "_total",
    "_seconds",
    "_ratio",
    "_running",
    "_waiting",
    "_unpublished",
    "_slots",
    "_blocks",
)


def _value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"tidemill_worker_{name}", labels) or 0.0


def _figures() -> dict[str, float]:
    return {
        "prompt": _value("prompt_tokens_total"),
        "cached": _value("cached_tokens_total"),
        "generated": _value("generated_tokens_total"),
        "first": _value("time_to_first_token_seconds_count"),
        "steps": _value("step_seconds_count"),
        "done": _value("jobs_ended_total", state="done"),
        "failed": _value("jobs_ended_total", state="failed"),
        "claimed": _value("jobs_claimed_total"),
    }


def test_a_worker_counts_tokens_steps_and_ends(redis_client: redis.Redis, rig: Rig) -> None:
    before = _figures()
    rig.runner.run_free()
    prompt = tuple(range(1, 10))
    for _ in range(2):
        job_id = rig.give(make_request(prompt, num_tokens=8))
        rig.wait_for(job_id, "done")
    rig.wait_for(rig.give(make_request(model="other")), "failed")
    rig.wait_for_status(lambda status: status.num_running == 0)
    after = _figures()
    counted = {name: after[name] - before[name] for name in before}
    # The second job finds the two full blocks of its prompt in the cache.
    assert counted == {
        "prompt": 10,
        "cached": 8,
        "generated": 16,
        "first": 2,
        "steps": 16,
        "done": 2,
        "failed": 1,
        "claimed": 2,
    }
    assert _value("sequences_running") == 0
    assert _value("tokens_unpublished") == 0


def test_names_carry_their_unit() -> None:
    names = {
        metric.name + ("_total" if metric.type == "counter" else "")
        for metric in REGISTRY.collect()
        if metric.name.startswith("tidemill_worker_")
    }
    assert len(names) > 15
    assert all(name.endswith(UNITS) for name in names)


def test_a_job_whose_end_is_under_way_is_not_lost(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _value("jobs_lost_total")
    publisher, may_go_on = rig.process._publisher, threading.Event()
    apply = publisher._apply

    def apply_late(writes: Sequence[Write], replies: Sequence[Written | Exception]) -> None:
        assert not any(write.end for write in writes) or may_go_on.wait(30)
        apply(writes, replies)

    monkeypatch.setattr(publisher, "_apply", apply_late)
    rig.runner.run_free()
    job_id = rig.give(make_request())
    rig.wait_for(job_id, "done")
    # The server has the end, we do not know it yet, and the heartbeat is told that it is over.
    rig.process._heartbeat.beat()
    rig.process._inbox.put(Cancelled("99-0", "job_another", 1))
    wait_until(lambda: rig.process._worker.status().last_command == "99-0")
    may_go_on.set()
    wait_until(lambda: not rig.process._jobs.all(), what="the reply to the end is taken in")
    assert _value("jobs_lost_total") == before


def test_a_job_on_its_way_back_is_not_lost(
    redis_client: redis.Redis, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, delayed = _value("jobs_lost_total"), _value("jobs_retried_total", outcome="delayed")
    releaser, may_go_on = rig.process._releaser, threading.Event()
    settle = releaser._settle

    def settle_late(batch: Sequence[object], replies: Sequence[object]) -> None:
        assert not batch or may_go_on.wait(30)
        settle(batch, replies)  # type: ignore[arg-type]

    monkeypatch.setattr(releaser, "_settle", settle_late)
    rig.runner.poison = {666}
    rig.runner.run_free()
    job_id = rig.give(make_request((666,)))
    rig.wait_for(job_id, "delayed")
    # The server has it back, we do not know it yet, and the heartbeat is told that it is gone.
    rig.process._heartbeat.beat()
    rig.process._inbox.put(Cancelled("99-0", "job_another", 1))
    wait_until(lambda: rig.process._worker.status().last_command == "99-0")
    may_go_on.set()
    wait_until(lambda: not rig.process._jobs.all(), what="the reply is taken in")
    assert _value("jobs_lost_total") == lost
    assert _value("jobs_retried_total", outcome="delayed") == delayed + 1
    rig.exhaust(job_id)


def test_a_job_that_was_taken_away_is_lost_once(redis_client: redis.Redis, rig: Rig) -> None:
    before = _value("jobs_lost_total")
    job_id = rig.give(make_request(num_tokens=100))
    rig.runner.allow(2)
    rig.wait_for_tokens(job_id, 2)
    rig.take_away(job_id)
    rig.runner.run_free()
    wait_until(lambda: not rig.process._jobs.all(), what="the job is dropped")
    rig.wait_for_status(lambda status: status.num_running == 0)
    assert _value("jobs_lost_total") == before + 1
    shard.cancel(redis_client, job_id)
