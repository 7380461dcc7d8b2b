"""``tidemill doctor``: what is well is called well, each planted fault is found, jobs on the move
alarm nobody.
"""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner

from support import shard
from support.puppet_worker import PuppetWorker
from support.shard import KEYS, QUEUE
from support.valkey import start_fast_server
from tidemill._cancel import cancel_call
from tidemill._reads import Location
from tidemill.cli.main import app
from tidemill.protocol.calls import JobRef
from tidemill.protocol.functions import LUA_SOURCE, ensure_library, run
from tidemill.protocol.keys import CONSUMER, GROUP
from tidemill.protocol.library import library_source
from tidemill.protocol.messages import JobTerms
from tidemill.service.diagnosis.counting import queued_differences
from tidemill.service.diagnosis.examine import examine
from tidemill.service.diagnosis.finding import Level
from tidemill.service.redis import connect

Checks = dict[str, dict[str, str]]


def run_doctor(url: str, *options: str) -> tuple[int, Checks]:
    done = CliRunner().invoke(app, ["doctor", "--json", "--redis-url", url, *options])
    report = json.loads(done.stdout)
    assert report["ok"] == (done.exit_code == 0)
    return done.exit_code, {check.pop("check"): check for check in report["checks"]}


@pytest.fixture
def mill(redis_client: redis.Redis) -> tuple[PuppetWorker, int]:
    """A worker and a leader."""
    return PuppetWorker(redis_client), shard.lead(redis_client)


@pytest.fixture
def jobs(redis_client: redis.Redis, mill: tuple[PuppetWorker, int]) -> Iterator[dict[str, str]]:
    """A queued, a delayed, a running and a finished job, those that live with limits in a batch."""
    worker, epoch = mill
    limited = JobTerms(deadline_ms=HOUR, batch="b")
    later = limited.model_copy(update={"delay_ms": HOUR // 2})
    names = {
        "queued": shard.submit(redis_client, terms=limited, num_tokens=3),
        "delayed": shard.submit(redis_client, terms=later),
        "running": shard.submit(redis_client),
        "done": shard.submit(redis_client),
    }
    for name in ("running", "done"):
        shard.dispatch(redis_client, names[name], epoch, worker.worker_id)
    shard.append(redis_client, names["running"], 1, 0, 2, worker.worker_id)
    shard.finish(redis_client, names["done"], 1, 0, 3, worker.worker_id)
    yield names
    for job_id in names.values():
        shard.cancel(redis_client, job_id, worker.worker_id)


@pytest.mark.usefixtures("jobs")
def test_an_installation_at_work_is_called_well(redis_url: str) -> None:
    status, checks = run_doctor(redis_url)

    assert status == 0
    bad = {name for name, check in checks.items() if check["level"] != "ok"}
    assert bad == {"durability"}, checks  # the tests' server never syncs
    assert "1 jobs wait in 1 queues" in checks["queues"]["finding"]
    assert "1 jobs wait for their time" in checks["delayed"]["finding"]
    assert "1 jobs run" in checks["leases"]["finding"]
    assert "1 live, serving m" in checks["workers"]["finding"]
    assert "sch_test in epoch 1" in checks["leader"]["finding"]


HOUR = 3_600_000

Fault = Callable[[redis.Redis, dict[str, str]], object]

FAULTS: dict[str, tuple[str, str, Fault]] = {
    "a queued job without its pointer": (
        "lost jobs",
        "failure",
        lambda c, j: c.xdel(KEYS.ingress(QUEUE), shard.entry_of(c, j["queued"])),
    ),
    "a running job without its lease": (
        "lost jobs",
        "failure",
        lambda c, j: c.zrem(KEYS.running, j["running"]),
    ),
    "a delayed job without its time": (
        "lost jobs",
        "failure",
        lambda c, j: c.zrem(KEYS.delayed, j["delayed"]),
    ),
    "a delayed job that nobody lets run": (
        "delayed",
        "failure",
        lambda c, j: c.zadd(KEYS.delayed, {j["delayed"]: 1}),
    ),
    "a time to run of a job that is queued": (
        "stale times",
        "warning",
        lambda c, j: c.zadd(KEYS.delayed, {j["queued"]: 9e12}),
    ),
    "a time limit of a job that ended": (
        "stale times",
        "warning",
        lambda c, j: c.zadd(KEYS.due, {j["done"]: 9e12}),
    ),
    "a batch that outlives its jobs": (
        "leaked keys",
        "warning",
        lambda c, j: c.hset(KEYS.batch("default", "gone"), "total", 1),
    ),
    "a lost count of a delayed job": (
        "counters",
        "warning",
        lambda c, j: c.hincrby(KEYS.counters, "q:default", -1),
    ),
    "tokens of a tenant that has no jobs": (
        "counters",
        "warning",
        lambda c, j: c.hset(KEYS.counters, "qt:else", 3),
    ),
    "a lost count of kept bytes": (
        "counters",
        "warning",
        lambda c, j: c.hincrby(KEYS.counters, "rb", 1),
    ),
    "a queue that is not listed": (
        "unlisted queues",
        "failure",
        lambda c, j: c.zrem(KEYS.active_queues, QUEUE),
    ),
    "a lease of a job that is gone": (
        "stale leases",
        "warning",
        lambda c, j: c.zadd(KEYS.running, {"job_gone": 9e12}),
    ),
    "a lease of a job that ended": (
        "stale leases",
        "warning",
        lambda c, j: c.zadd(KEYS.running, {j["done"]: 9e12}),
    ),
    "a pointer of a job that is gone": (
        "stale pointers",
        "warning",
        lambda c, j: c.xadd(KEYS.ingress(QUEUE), {"j": "job_gone"}),
    ),
    "a second pointer of a queued job": (
        "stale pointers",
        "warning",
        lambda c, j: c.xadd(KEYS.ingress(QUEUE), {"j": j["queued"]}),
    ),
    "an ended job that stays": (
        "leaked keys",
        "warning",
        lambda c, j: c.persist(KEYS.job(j["done"])),
    ),
    "a token log that outlives its job": (
        "leaked keys",
        "warning",
        lambda c, j: c.persist(KEYS.token_log(j["done"])),
    ),
    "an idempotency key that outlives its job": (
        "leaked keys",
        "warning",
        lambda c, j: c.set(KEYS.idempotency("default", "k"), f"- {j['done']}"),
    ),
    "a key of no kind": ("leaked keys", "warning", lambda c, j: c.set(f"{KEYS.prefix}odd", "x")),
    "a lost count of queued jobs": (
        "counters",
        "warning",
        lambda c, j: c.hincrby(KEYS.counters, "q:default", 1),
    ),
    "a count of a tenant that has no jobs": (
        "counters",
        "warning",
        lambda c, j: c.hset(KEYS.counters, "q:else", 3),
    ),
    "a lost count of running jobs": (
        "counters",
        "warning",
        lambda c, j: c.hincrby(KEYS.counters, "r:default", 1),
    ),
    "a dead letter": (
        "dead letters",
        "warning",
        lambda c, j: c.xadd(KEYS.dead_letters, {"j": "x"}),
    ),
    "a lease that nobody reaps": (
        "leases",
        "failure",
        lambda c, j: c.zadd(KEYS.running, {j["running"]: 1}),
    ),
    "nobody who leads": ("leader", "failure", lambda c, j: c.delete(KEYS.leader)),
    "a leader for ever": ("leader", "failure", lambda c, j: c.persist(KEYS.leader)),
    "jobs without a worker": ("workers", "failure", lambda c, j: c.delete(KEYS.workers)),
    "a model without a worker": (
        "workers",
        "warning",
        lambda c, j: c.zadd(KEYS.models, {"other": 9e12}),
    ),
    "a counter that is no number": (
        "damaged counters",
        "failure",
        lambda c, j: c.hset(KEYS.counters, "q:else", "abc"),
    ),
    "a counter of a tenant that is no text": (
        "damaged counters",
        "failure",
        lambda c, j: c.hset(KEYS.counters, b"q:\xff", 1),
    ),
    "a worker that is no text": (
        "damaged names",
        "failure",
        lambda c, j: c.zadd(KEYS.workers, {b"\xff": 9e15}),
    ),
    "a model that is no text": (
        "damaged names",
        "failure",
        lambda c, j: c.zadd(KEYS.models, {b"\xff": 9e15}),
    ),
    "a queue that is no text": (
        "damaged names",
        "failure",
        lambda c, j: c.zadd(KEYS.active_queues, {b"p9:\xff": 1}),
    ),
    "an ended job without its bytes": (
        "damaged ended jobs",
        "failure",
        lambda c, j: c.zadd(KEYS.ended, {b"\xff \xfe": 1}),
    ),
    "a lease that is no text": (
        "stale leases",
        "warning",
        lambda c, j: c.zadd(KEYS.running, {b"\xff": 9e12}),
    ),
    "a limit that is no number": (
        "settings",
        "warning",
        lambda c, j: c.hset(KEYS.settings, "jobs:red", "nan"),
    ),
    "a limit below zero": (
        "settings",
        "warning",
        lambda c, j: c.hset(KEYS.settings, "jobs:red", -5),
    ),
    "a setting of no kind": (
        "settings",
        "warning",
        lambda c, j: c.hset(KEYS.settings, "zzz:red", 1),
    ),
    "a worker that cannot be read": (
        "workers",
        "warning",
        lambda c, j: c.zadd(KEYS.workers, {"wkr_new": 9e12}),
    ),
}


@pytest.mark.leaks_keys
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(
    redis_url: str, redis_client: redis.Redis, jobs: dict[str, str], fault: str
) -> None:
    check, level, plant = FAULTS[fault]
    plant(redis_client, jobs)

    status, checks = run_doctor(redis_url)

    assert checks[check]["level"] == level, checks
    assert checks[check]["fix"]
    assert status == (1 if level == "failure" else 0)


@pytest.mark.leaks_keys
@pytest.mark.usefixtures("jobs")
def test_damage_is_named_and_the_rest_is_examined_all_the_same(
    redis_url: str, redis_client: redis.Redis
) -> None:
    damage: dict[str, str | int] = {"q:default": "abc", "r:default": 7, "rb": "x"}
    redis_client.hset(KEYS.counters, mapping=damage)
    redis_client.zadd(KEYS.due, {"job_gone": float("inf")})
    redis_client.zadd(KEYS.delayed, {"job_gone": float("-inf")})
    redis_client.set(KEYS.epoch, "abc")

    checks = run_doctor(redis_url)[1]

    damaged = checks["damaged counters"]["finding"]
    assert '"q:default" = "abc"' in damaged and '"rb" = "x"' in damaged and "sche" in damaged
    assert checks["counters"]["finding"] == "1 off: r:* by +6"
    assert "1 jobs wait in 1 queues" in checks["queues"]["finding"]


@pytest.mark.leaks_keys
def test_entries_of_the_front_door_that_wait_for_long_are_told(
    redis_url: str, redis_client: redis.Redis
) -> None:
    entry = redis_client.xadd(KEYS.front_door, {"r": "x"})
    redis_client.xgroup_create(KEYS.front_door, GROUP, "0")
    redis_client.xreadgroup(GROUP, CONSUMER, {KEYS.front_door: ">"})
    assert run_doctor(redis_url)[1]["front door"]["level"] == "ok"

    redis_client.xclaim(KEYS.front_door, GROUP, CONSUMER, 0, [entry], idle=HOUR)

    told = run_doctor(redis_url)[1]["front door"]
    assert told["level"] == "warning" and entry.decode() in told["finding"]


@pytest.mark.leaks_keys
def test_dead_letters_are_left_to_the_command_for_them(
    redis_url: str, redis_client: redis.Redis
) -> None:
    redis_client.xadd(KEYS.dead_letters, {"j": "x"})
    assert "tidemill dlq" in run_doctor(redis_url)[1]["dead letters"]["fix"]


def test_bytes_without_any_job_are_a_miscount(redis_url: str, redis_client: redis.Redis) -> None:
    redis_client.hset(KEYS.counters, "qb", 7)
    assert "qb by +7" in run_doctor(redis_url)[1]["counters"]["finding"]


def test_old_functions_are_told_once_nobody_uses_them(
    redis_url: str, redis_client: redis.Redis
) -> None:
    redis_client.function_load(library_source(1))
    try:
        redis_client.zadd(KEYS.libraries, {"tm1": 9e12})
        used = run_doctor(redis_url)[1]["old functions"]
        redis_client.zadd(KEYS.libraries, {"tm1": 1})
        unused = run_doctor(redis_url)[1]["old functions"]
    finally:
        redis_client.function_delete("tm1")
    assert (used["level"], used["finding"]) == ("ok", "in use: tm1")
    assert unused["level"] == "warning" and "FUNCTION DELETE tm1" in unused["fix"]


@pytest.mark.parametrize(
    ("counts", "waiting", "num_delayed", "complete", "expected"),
    [
        ({"q:a": 2, "q:b": 1}, {"a": 2, "b": 0}, 0, True, {"q:a": 0, "q:b": 1}),
        ({"q:a": 2, "q:b": 1}, {"a": 1, "b": 0}, 2, True, {"q:*": 0}),
        ({"q:a": 2, "q:b": 1}, {"a": 1, "b": 0}, 1, True, {"q:*": 1}),
        ({"q:a": 2}, {"a": 1, "b": 1}, 5, True, {"q:b": -1}),
        ({"q:a": 2}, {"a": 1}, 5, False, {}),
    ],
)
def test_delayed_jobs_are_counted_with_those_that_have_pointers(
    counts: dict[str, int],
    waiting: dict[str, int],
    num_delayed: int,
    complete: bool,
    expected: dict[str, int],
) -> None:
    assert queued_differences(counts, waiting, num_delayed, complete=complete) == expected


def test_webhooks_that_nobody_delivers_are_told(redis_client: redis.Redis, redis_url: str) -> None:
    assert run_doctor(redis_url)[1]["webhooks"]["level"] == "ok"
    now = shard.server_ms(redis_client)
    redis_client.zadd(KEYS.due_deliveries, {"evt_1-we_1": now + 3_600_000})
    redis_client.xadd(KEYS.outbox, {"j": "job"})
    told = run_doctor(redis_url)[1]["webhooks"]
    assert told["level"] == "ok"
    assert told["finding"] == "1 ends to tell, 1 deliveries on their way"
    redis_client.zadd(KEYS.due_deliveries, {"evt_1-we_1": now - 600_000})
    told = run_doctor(redis_url)[1]["webhooks"]
    assert told["level"] == "warning" and "late by 10 min" in told["finding"]
    redis_client.delete(KEYS.due_deliveries, KEYS.outbox)
    redis_client.xadd(KEYS.outbox, {"j": "job"}, id=f"{now - 600_000}-0")
    assert run_doctor(redis_url)[1]["webhooks"]["level"] == "warning"


LOST_WITHOUT = {"queued": "pointer", "delayed": "time", "running": "lease"}


@pytest.mark.parametrize("state", LOST_WITHOUT)
def test_a_lost_job_can_be_ended_as_the_fix_says(
    redis_url: str, redis_client: redis.Redis, jobs: dict[str, str], state: str
) -> None:
    FAULTS[f"a {state} job without its {LOST_WITHOUT[state]}"][2](redis_client, jobs)
    assert jobs[state] in run_doctor(redis_url)[1]["lost jobs"]["finding"]

    done = CliRunner().invoke(app, ["cancel", jobs[state], "--redis-url", redis_url])

    assert done.exit_code == 0, done.output
    checks = run_doctor(redis_url)[1]
    assert (checks["lost jobs"]["level"], checks["counters"]["level"]) == ("ok", "ok")


def test_jobs_that_wait_too_long_are_named(redis_url: str, redis_client: redis.Redis) -> None:
    queue = "p0:default"
    redis_client.xadd(KEYS.ingress(queue), {"j": "x"}, id="1000-0")
    redis_client.zadd(KEYS.active_queues, {queue: 1000})

    checks = run_doctor(redis_url)[1]

    assert checks["queues"]["level"] == "warning"
    assert "too long in p0:default" in checks["queues"]["finding"]


def test_the_look_at_the_keys_ends_at_its_bound_and_says_so(
    redis_url: str, redis_client: redis.Redis
) -> None:
    with redis_client.pipeline() as pipe:
        for number in range(3000):
            pipe.set(f"{KEYS.prefix}w:{number}", "x", ex=60)
        pipe.execute()

    bounded = run_doctor(redis_url, "--max-keys", "700")[1]
    whole = run_doctor(redis_url)[1]

    assert bounded["keys"]["finding"].startswith("700 of about 3,000")
    assert whole["keys"]["finding"].startswith("all 3,000")


def test_jobs_on_the_move_are_not_called_lost(
    redis_url: str, redis_client: redis.Redis, mill: tuple[PuppetWorker, int]
) -> None:
    worker, epoch = mill
    stop = threading.Event()

    def churn() -> None:
        number = 0
        with connect(redis_url) as client:
            while not stop.is_set():
                waiting = [shard.submit(client) for _ in range(8)]
                later = shard.submit(client, terms=JobTerms(delay_ms=HOUR, batch="b"))
                client.zadd(KEYS.delayed, {later: 1}, xx=True)
                shard.promote(client, later)
                waiting.append(later)
                for job_id in waiting[:6]:
                    shard.dispatch(client, job_id, epoch, worker.worker_id)
                shard.expire_lease(client, waiting[0])
                shard.reap(client, waiting[0])
                for job_id in waiting[1:6]:
                    shard.finish(client, job_id, 1, 0, 1, worker.worker_id)
                for job_id in waiting:
                    shard.cancel(client, job_id)
                number += 1
                keyed = shard.submit(client, idempotency_key=str(number))
                run(client, cancel_call(keyed, Location(JobRef(keyed, QUEUE, str(number)), "")))

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        reports = [examine(redis_client, KEYS, max_keys=2000) for _ in range(15)]
    finally:
        stop.set()
        thread.join()
    moving = {"lost jobs", "unlisted queues", "stale leases", "stale pointers", "leaked keys"}
    alarms = [f for found in reports for f in found if f.check in moving | {"counters"}]
    assert {f.check for f in alarms} == moving | {"counters"}
    assert [f for f in alarms if f.level is not Level.OK] == []


def test_a_server_without_the_functions_or_with_others_is_told(tmp_path: Path) -> None:
    with start_fast_server(tmp_path) as server, connect(server.url) as client:
        missing = run_doctor(server.url)
        client.function_load(LUA_SOURCE.replace("'QUEUEFULL ", "'FULL "))
        other = run_doctor(server.url)
        ensure_library(client)
        current = run_doctor(server.url)[1]
    assert missing[0] == other[0] == 1
    assert "not loaded" in missing[1]["functions"]["finding"]
    assert "differs" in other[1]["functions"]["finding"]
    assert current["functions"]["level"] == "ok"


def test_an_absent_server_is_one_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--redis-url", f"unix://{tmp_path}/none"])
    assert done.exit_code == 1
    assert "the broker does not answer" in str(done.exception)


@pytest.mark.usefixtures("jobs")
def test_the_table_shows_every_check_and_its_fix(redis_url: str) -> None:
    done = CliRunner().invoke(app, ["doctor", "--redis-url", redis_url], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    for name in run_doctor(redis_url)[1]:
        assert name in done.stdout
    assert "appendfsync always" in done.stdout
