"""Supervision: what dies is started again, what cannot start is told, nothing is left behind."""

import os
import signal
from pathlib import Path

import pytest
import redis

from support.scheduler_process import wait_for_leader
from support.wait import wait_until
from tidemill.cli.child import Child, ChildSpec
from tidemill.cli.stack import Stack, StackOptions
from tidemill.protocol.errors import ConfigError
from tidemill.service.redis import connect
from tidemill.service.runtime import ParentLink


def start(module_args: tuple[str, ...], seen: list[str], ended: list[Child]) -> Child:
    spec = ChildSpec("child", *module_args[:1], module_args[1:])
    return Child(spec, ParentLink(), sink=seen.append, on_exit=ended.append)


def test_a_childs_output_is_forwarded_and_its_exit_reported_once() -> None:
    seen: list[str] = []
    ended: list[Child] = []
    child = start(("json.tool", "--help"), seen, ended)
    assert child.wait(20) and child.exit_status == 0
    assert any("usage" in line for line in seen)
    assert ended == [child]


def test_the_last_error_line_of_a_child_is_its_complaint() -> None:
    seen: list[str] = []
    child = start(("tidemill_gpuworker", "--model", "m", "--no-such-option"), seen, [])
    assert child.wait(60) and child.exit_status not in (0, None)
    assert child.complaint.startswith("unrecognized arguments: --no-such-option")
    assert not any("--no-such-option" in line for line in seen), "told by whoever gives it up"


def test_a_child_that_says_nothing_still_has_a_complaint() -> None:
    child = start(("no_such_module_at_all",), [], [])
    assert child.wait(20)
    assert "no_such_module_at_all" in child.complaint


def options(tmp_path: Path, **changes: object) -> StackOptions:
    settings = {"redis_url": None, "data_dir": tmp_path, "fsync": "no", "num_workers": 0}
    return StackOptions(**{**settings, **changes})  # type: ignore[arg-type]


def test_a_killed_broker_and_a_killed_scheduler_come_back(tmp_path: Path) -> None:
    with Stack(options(tmp_path), sink=lambda line: None) as stack:
        for kind in ("broker", "scheduler"):
            [pid] = stack.pids(kind)
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda kind=kind, pid=pid: stack.pids(kind) not in ([], [pid]), 30)
        with connect(stack.url) as client:
            assert client.ping()
    assert stack.failure is None


def test_the_password_of_a_broker_is_on_no_command_line(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    redis_client.acl_setuser(
        "tide",
        enabled=True,
        passwords=["+s3cret"],
        keys=["*"],
        channels=["*"],
        categories=["+@all"],
    )
    try:
        url = redis_url.replace("unix://", "unix://tide:s3cret@")
        with Stack(options(tmp_path, redis_url=url), sink=lambda line: None) as stack:
            wait_for_leader(redis_client)
            [pid] = stack.pids("scheduler")
            assert b"s3cret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    finally:
        redis_client.acl_deluser("tide")


def test_a_worker_that_cannot_start_is_told_and_everything_stopped(tmp_path: Path) -> None:
    stack = Stack(
        options(tmp_path, num_workers=1, worker_args=("--model", "/does/not/exist")),
        sink=lambda line: None,
    )
    with pytest.raises(ConfigError, match="/does/not/exist"), stack:
        pass
    assert stack.pids("worker") == stack.pids("scheduler") == stack.pids("broker") == []
