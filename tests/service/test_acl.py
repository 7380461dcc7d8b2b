"""The users of docker/acl: each does its whole work and nothing else."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from redis.exceptions import NoPermissionError, ResponseError

from support.acl_server import ROLES, AclServer, acl_lines, acl_server
from support.batch_shop import create, request_line
from support.scheduler_process import spawn_scheduler, wait_for_leader
from support.shard import KEYS
from support.wait import wait_until
from tidemill import Job, JobState, Producer
from tidemill.batches.client import AsyncBatches
from tidemill.protocol import calls
from tidemill.protocol.errors import BrokerUnsupported, JobCancelled
from tidemill.protocol.functions import LUA_SOURCE, ensure_library, run
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.messages import GenerateRequest
from tidemill.service.blobs.store import BlobStore
from tidemill.service.diagnosis.examine import examine
from tidemill.service.redis import check_server

TESTS = Path(__file__).parents[1]
JOB = KEYS.job("job_00" + "0" * 26)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AclServer]:
    with acl_server(tmp_path_factory.mktemp("acl")) as server:
        yield server


@contextmanager
def fake_worker(
    url: str, log_path: Path, step_seconds: float = 0.005
) -> Iterator[subprocess.Popen[str]]:
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "support.fake_worker", url, str(step_seconds)],
            env={**os.environ, "PYTHONPATH": str(TESTS)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("wkr_"), log_path.read_text()
        yield process
    finally:
        process.terminate()
        process.wait(20)
        assert process.stdout is not None
        process.stdout.close()


def submit_unchecked(client: redis.Redis, prompt: str) -> str:
    """As a producer without a tokenizer does."""
    run(client, calls.salt(KEYS, tenant="default", random=b"\x07" * 16))
    job = calls.NewJob(new_job_id(), GenerateRequest(model="m", prompt=prompt))
    return run(client, calls.submit(KEYS, job)).job_id


@pytest.mark.timeout(120)
def test_every_role_does_its_whole_work_without_being_refused_once(
    server: AclServer, tmp_path: Path
) -> None:
    server.refusals()
    scheduler = spawn_scheduler(server.url("scheduler"), tmp_path / "scheduler.log")
    try:
        with server.client("reader") as reader:
            wait_for_leader(reader)
        with Producer(server.url("producer")) as producer:
            _serve(server, producer, tmp_path)
            _bury_and_refuse(server, producer)
        assert scheduler.drain() == 0
    finally:
        scheduler.kill()
    assert server.refusals() == []
    for log in tmp_path.glob("*.log"):
        assert "permission" not in log.read_text()
    with server.client("reader") as reader:
        assert reader.get(KEYS.leader) is None, "the scheduler resigned"


def _serve(server: AclServer, producer: Producer, tmp_path: Path) -> None:
    url, log_path = server.url("worker"), tmp_path / "worker.log"
    with fake_worker(url, log_path) as worker:
        job = producer.submit("tide mill", max_tokens=5, idempotency_key="once")
        assert producer.submit("tide mill", max_tokens=5, idempotency_key="once").id == job.id
        assert sum(len(chunk.ids) for chunk in job.stream()) == 5
        assert len(job.result(timeout=20).token_ids) == 5
        for role in ("producer", "reader"):
            with Producer(server.url(role)) as onlooker:
                status = onlooker.status()
                assert (len(status.workers), status.models[0].name) == (1, "m")
                assert onlooker.result(job.id).token_ids == job.result().token_ids
                assert [c.ids for c in onlooker.stream(job.id)] == [c.ids for c in job.stream()]

        asyncio.run(_work_off_a_batch(server, tmp_path))

        cancelled = _begin(producer)
        assert cancelled.cancel() is JobState.CANCELLED
        with pytest.raises(JobCancelled):
            cancelled.result(timeout=20)

        orphan = _begin(producer)
        worker.kill()
        worker.wait(20)
    with fake_worker(url, log_path, 0.02) as worker:
        # Reaped, queued again, dispatched again.
        assert len(orphan.result(timeout=40).token_ids) == 100
        released = _begin(producer)
        worker.terminate()
        wait_until(lambda: _is_draining(producer), 20, "the worker drains")
        worker.terminate()
        assert worker.wait(20) == 0
        assert released.status().state is JobState.QUEUED
        assert released.cancel() is JobState.CANCELLED


async def _work_off_a_batch(server: AclServer, tmp_path: Path) -> None:
    blobs = BlobStore(str(tmp_path / "data" / "blobs"))
    async with AsyncBatches(server.url("producer"), blobs=blobs) as client:
        batch = await create(client, [request_line(n, prompt="tide mill") for n in range(3)])
        while not (batch := await client.batch(batch.batch_id)).state.is_terminal:
            await asyncio.sleep(0.05)
        assert (await client.batches()).items == [batch]
        assert (batch.state, batch.num_answered) == ("completed", 3)
        for file in (await client.files()).items:
            await client.delete_file(file.file_id)
        assert (await client.cancel_batch((await create(client, [b"x"])).batch_id)).batch_id


def _begin(producer: Producer) -> Job:
    job = producer.submit("water wheel", max_tokens=100)
    with job.stream() as stream:
        next(stream)
    return job


def _is_draining(producer: Producer) -> bool:
    [worker] = producer.status().workers
    return worker.status is not None and worker.status.draining


def _bury_and_refuse(server: AclServer, producer: Producer) -> None:
    with server.client("producer") as client, server.client("reader") as reader:
        too_long = submit_unchecked(client, "tide " * 1000)
        wait_until(lambda: producer.job_status(too_long).state is JobState.FAILED, 40)
        run(client, calls.salt(KEYS, tenant="default", random=b"\x07" * 16))
        waiting = submit_unchecked(client, "tide")
        client.xadd(KEYS.ingress("p1:default"), {"nonsense": "1"})
        wait_until(lambda: reader.xlen(KEYS.dead_letters), 20, "a dead letter")
        assert producer.cancel(waiting) is JobState.CANCELLED


#: What nobody but the deploy user, and in part not even that one, may do.
_EVERYBODY = [
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("KEYS", "*"),
    ("CONFIG", "SET", "maxmemory", "1"),
    ("EVAL", "return 1", "0"),
    ("ACL", "SETUSER", "eve", "on", "nopass", "+@all", "~*"),
    ("ACL", "LIST"),
    ("CLIENT", "KILL", "ID", "1"),
    ("SHUTDOWN",),
    ("REPLICAOF", "NO", "ONE"),
    ("MONITOR",),
    ("FUNCTION", "FLUSH"),
    ("RENAME", JOB, "tm:{00}:j:x"),
    ("GET", "somebody:else"),
    ("SPUBLISH", "somebody:else", "x"),
]
_WRITES = [
    ("HSET", JOB, "st", "done"),
    ("DEL", JOB),
    ("XADD", KEYS.dead_letters, "*", "a", "b"),
    ("ZADD", KEYS.running, "1", "a"),
    ("SET", KEYS.leader, "a"),
    ("HINCRBY", KEYS.counters, "q:a", "1"),
    ("SPUBLISH", KEYS.bell, "x"),
    ("PEXPIRE", JOB, "1"),
    ("FCALL", "tm2_cancel", "1", JOB),
    ("FCALL", "tm2_submit", "1", JOB),
    ("FCALL", "tm2_salt", "1", KEYS.salts, "a", "b"),
]
_LOADS = [("FUNCTION", "LOAD", "REPLACE", "x"), ("FUNCTION", "DELETE", "tm2")]
_CONFIG = [("CONFIG", "GET", "*")]
_SCAN = [("SCAN", "0")]


def _calls(*names: str) -> list[tuple[str, ...]]:
    return [("FCALL", f"tm2_{name}", "1", JOB) for name in names]


FORBIDDEN: dict[str, list[tuple[str, ...]]] = {
    "producer": [
        *_calls("edit_hook", "post_event", "take_delivery", "mark_delivery", "replay_delivery"),
        ("HSET", KEYS.hooks("a"), "cb", "[]"),
        ("HSET", KEYS.api_keys, "a", "{}"),
        *_calls("use_key", "charge_key"),
        *_calls("dispatch", "append", "finish", "beat", "reap", "retire", "lead", "register"),
        *_calls("release", "nack", "expire", "promote", "trim", "measure", "answer", "drop_letter"),
        ("HSET", KEYS.settings, "jobs:*", "9"),
        ("XADD", KEYS.front_door, "*", "v", "1"),
        *(_EVERYBODY + _LOADS + _CONFIG + _SCAN),
        ("DEL", JOB),
        ("SET", KEYS.leader, "me"),
        ("INCR", KEYS.epoch),
        ("ZADD", KEYS.workers, "1", "me"),
        ("ZADD", KEYS.running, "1", "me"),
        ("HSET", KEYS.worker_info("me"), "info", "x"),
        ("HSET", KEYS.model("m"), "card", "x"),
        ("SET", KEYS.tokenizer("d"), "x"),
        ("XADD", KEYS.status("me"), "*", "s", "x"),
        ("XADD", KEYS.dead_letters, "*", "a", "b"),
        ("XREADGROUP", "GROUP", "sched", "s", "STREAMS", KEYS.ingress("p1:a"), ">"),
        ("HSET", KEYS.salts, "a", "b"),
    ],
    "gateway": [
        *_calls("edit_hook", "dispatch", "append", "finish", "lead", "register", "drop_letter"),
        ("HSET", KEYS.api_keys, "a", "{}"),
        ("HDEL", KEYS.api_keys, "a"),
        ("HDEL", KEYS.api_key_uses, "a"),
        ("HSET", KEYS.settings, "jobs:*", "9"),
        *(_EVERYBODY + _LOADS + _CONFIG + _SCAN),
        ("DEL", JOB),
        ("HSET", KEYS.salts, "a", "b"),
    ],
    "worker": [
        *_calls("edit_hook", "post_event", "take_delivery", "mark_delivery", "replay_delivery"),
        ("HSET", KEYS.hooks("a"), "cb", "[]"),
        *_calls("submit", "salt", "dispatch", "cancel", "reap", "retire", "lead"),
        *_calls("admit", "refuse", "read", "acknowledge"),
        *_calls("expire", "promote", "trim", "measure", "answer", "drop_letter", "close_batch"),
        *(_EVERYBODY + _LOADS + _CONFIG + _SCAN),
        ("SET", KEYS.leader, "me"),
        ("INCR", KEYS.epoch),
        ("XADD", KEYS.commands("other"), "*", "k", "run"),
        ("HSET", KEYS.settings, "jobs:*", "9"),
        ("XADD", KEYS.front_door, "*", "v", "1"),
        ("XREADGROUP", "GROUP", "sched", "s", "STREAMS", KEYS.ingress("p1:a"), ">"),
        ("XDEL", KEYS.ingress("p1:a"), "1-1"),
        ("DEL", JOB),
        ("HSET", KEYS.salts, "a", "b"),
        ("SSUBSCRIBE", KEYS.bell),
    ],
    "scheduler": [
        *_calls("append", "finish", "nack", "beat", "register", "release", "deregister"),
        *_calls("drop_letter", "drop_file", "create_batch", "stop_batch"),
        # It reads how durable the server is.
        *(_EVERYBODY + _LOADS[:1] + _SCAN),
        ("CONFIG", "SET", "maxmemory", "1"),
        ("HSET", KEYS.settings, "jobs:*", "9"),
        ("XADD", KEYS.front_door, "*", "v", "1"),
        ("XDEL", KEYS.dead_letters, "1-1"),
        ("HSET", KEYS.worker_info("me"), "info", "x"),
        ("HSET", KEYS.model("m"), "card", "x"),
        ("SET", KEYS.tokenizer("d"), "x"),
        ("XADD", KEYS.status("me"), "*", "s", "x"),
        ("HSET", KEYS.salts, "a", "b"),
    ],
    "operator": [
        *_calls("dispatch", "append", "finish", "beat", "reap", "retire", "lead", "register"),
        *_calls("release", "nack", "expire", "promote", "trim", "measure", "answer"),
        *(_EVERYBODY + _LOADS + _CONFIG),
        ("SET", KEYS.leader, "me"),
        ("XADD", KEYS.dead_letters, "*", "a", "b"),
        ("ZADD", KEYS.workers, "1", "me"),
        ("HSET", KEYS.salts, "a", "b"),
    ],
    "guest": [
        *_calls("submit", "salt", "cancel", "finish", "lead"),
        *(_EVERYBODY + _WRITES + _LOADS + _CONFIG + _SCAN),
        ("HGETALL", JOB),
        ("HGETALL", KEYS.salts),
        ("XRANGE", KEYS.front_door, "-", "+"),
        ("XDEL", KEYS.back_door("a"), "1-1"),
        ("XADD", KEYS.back_door("a"), "*", "j", "x"),
        ("SSUBSCRIBE", KEYS.token_channel("j")),
    ],
    "reader": [
        *_calls("dispatch", "append", "finish", "beat", "reap", "retire", "lead", "register"),
        *(_EVERYBODY + _WRITES + _LOADS + _CONFIG),
        ("SSUBSCRIBE", KEYS.bell),
    ],
    "deploy": [
        *_calls("dispatch", "append", "finish", "beat", "reap", "retire", "lead", "register"),
        *(_EVERYBODY + _WRITES),
        ("SSUBSCRIBE", KEYS.token_channel("j")),
    ],
}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_refused_whatever_is_not_its_work(server: AclServer, role: str) -> None:
    server.refusals()
    with server.client(role) as client:
        for command in FORBIDDEN[role]:
            with pytest.raises(NoPermissionError):
                client.execute_command(*command)
                pytest.fail(f"{role} may {command}")
    assert {refusal["username"] for refusal in server.refusals()} == {role}


def test_without_a_password_nobody_gets_in(server: AclServer) -> None:
    with (
        redis.Redis(unix_socket_path=str(server.socket_path)) as client,
        pytest.raises(redis.AuthenticationError),
    ):
        client.ping()


def test_the_shipped_users_have_no_password_until_they_are_given_one() -> None:
    lines = acl_lines()
    assert lines.keys() == {"default", *ROLES}
    assert lines["default"].split()[2] == "off"
    for line in lines.values():
        assert "-@all" in line and "+@" not in line
        assert not re.search(r"[ (](nopass|~\*|&\*|[>#])", line)


def test_the_gateway_may_what_a_producer_may() -> None:
    lines = acl_lines()
    assert lines["gateway"].startswith(lines["producer"].replace("user producer", "user gateway"))


def test_every_function_belongs_to_a_role() -> None:
    granted = set(re.findall(r"\+fcall\|tm2_([a-z_]+)", " ".join(acl_lines().values())))
    assert granted == set(re.findall(r"^register_function\('([a-z_]+)'", LUA_SOURCE, re.MULTILINE))


@pytest.mark.parametrize("role", sorted(set(ROLES) - {"guest"}))
def test_starting_up_needs_no_more_than_a_role_has(server: AclServer, role: str) -> None:
    server.refusals()
    with server.client(role) as client:
        check_server(client)
        ensure_library(client)
    assert server.refusals() == []


def test_the_doctor_can_be_run_by_the_reader_and_sees_more_as_the_deploy_user(
    server: AclServer,
) -> None:
    seen = {}
    server.refusals()
    for role in ("reader", "deploy"):
        with server.client(role) as client:
            seen[role] = {f.check: f for f in examine(client, KEYS)}
    # So it writes nothing either.
    assert [(r["username"], r["object"]) for r in server.refusals()] == [("reader", "config|get")]
    assert "hidden" in seen["reader"]["durability"].finding
    assert seen["deploy"]["durability"].finding.startswith("fast")
    for check in ("functions", "lost jobs", "leaked keys"):
        assert seen["reader"][check] == seen["deploy"][check]


def test_who_may_not_load_functions_says_that_they_are_missing(tmp_path: Path) -> None:
    with acl_server(tmp_path / "s", load=False) as server:
        with server.client("worker") as client, pytest.raises(BrokerUnsupported, match="may not"):
            ensure_library(client)
        with server.client("tester") as tester:
            tester.execute_command("ACL", "SETUSER", "worker", "-function|list")
        with server.client("worker") as client, pytest.raises(BrokerUnsupported, match="may not"):
            ensure_library(client)
        with server.client("deploy") as client:
            ensure_library(client)
        with server.client("worker") as client:
            ensure_library(client)


def test_functions_run_with_the_rights_of_their_caller(server: AclServer) -> None:
    # Why a producer must be able to write job hashes, and so why an untrusted one must not be
    # given raw access: the server checks what a function does against who called it.
    with server.client("tester") as tester:
        tester.execute_command("ACL", "SETUSER", "narrow", "on", ">p", "+fcall|tm2_salt", "~tm:*")
        narrow = redis.Redis(
            unix_socket_path=str(server.socket_path), username="narrow", password="p"
        )
        with narrow, pytest.raises(ResponseError, match="script"):
            narrow.fcall("tm2_salt", 1, KEYS.salts, "t", "r")
        tester.execute_command("ACL", "DELUSER", "narrow")
