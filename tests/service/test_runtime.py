"""How processes end: drained, stopped, orphaned, or crashed on purpose."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from support.wait import wait_until
from tidemill.service.runtime import (
    CRASH_STATUS,
    ORPHANED_STATUS,
    CrashPlan,
    Drain,
    ParentLink,
    StopSignal,
    exit_with_parent,
)


@contextmanager
def python(script: str, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_wait_returns_what_it_found() -> None:
    flag = StopSignal()
    assert not flag.wait(0.0)
    flag.set()
    flag.set()
    assert flag.wait(0.0)
    assert flag.wait()
    flag.close()


def test_a_flag_wakes_a_thread_that_waits_for_it() -> None:
    flag, woken = StopSignal(), []
    thread = threading.Thread(target=lambda: woken.append(flag.wait(30)))
    thread.start()
    flag.set()
    thread.join(30)
    assert woken == [True]
    flag.close()


def test_a_flag_is_up_before_anybody_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    flag, seen = StopSignal(), []
    monkeypatch.setattr(os, "write", lambda *_: seen.append(flag.is_set))
    flag.set()
    monkeypatch.undo()
    assert seen == [True]
    flag.close()


async def test_a_flag_wakes_every_task_that_waits_for_it() -> None:
    flag = StopSignal()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(flag.wait_async()) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        flag.set()
    await flag.wait_async()
    flag.close()


async def test_a_cancelled_wait_leaves_no_descriptor_behind() -> None:
    flag = StopSignal()
    before = psutil.Process().num_fds()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await flag.wait_async()
    assert psutil.Process().num_fds() == before
    flag.close()


def test_a_flag_may_be_raised_after_it_was_closed() -> None:
    flag = StopSignal()
    flag.close()
    flag.close()
    flag.set()
    assert flag.is_set


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_drains_and_the_second_stops(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Drain() as drain:
        os.kill(os.getpid(), number)
        assert drain.draining.wait(30)
        assert not drain.stopping.is_set
        os.kill(os.getpid(), number)
        assert drain.stopping.wait(30)
        assert signal.getsignal(number) is before
    assert signal.getsignal(number) is before


def test_a_request_counts_as_a_signal() -> None:
    with Drain() as drain:
        drain.request()
        assert drain.draining.is_set
        assert not drain.stopping.is_set
        drain.request()
        assert drain.stopping.is_set


def test_a_signal_wakes_an_idle_event_loop() -> None:
    script = """
import asyncio
from tidemill.service.runtime import Drain
async def main():
    with Drain() as drain:
        print("ready", flush=True)
        await drain.draining.wait_async()
        print("draining", flush=True)
        await drain.stopping.wait_async()
        print("stopping", flush=True)
asyncio.run(main())
"""
    with python(script) as process:
        assert read_line(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert read_line(process) == "draining"
        process.send_signal(signal.SIGINT)
        assert read_line(process) == "stopping"
        assert process.wait(30) == 0


def test_a_third_signal_ends_a_process_that_hangs() -> None:
    script = """
import time
from tidemill.service.runtime import Drain
with Drain() as drain:
    print("ready", flush=True)
    drain.draining.wait()
    print("draining", flush=True)
    drain.stopping.wait()
    print("hangs", flush=True)
    time.sleep(600)
"""
    with python(script) as process:
        for said in ("ready", "draining", "hangs"):
            assert read_line(process) == said
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM


PARENT = """
import os, subprocess, sys
from tidemill.service.runtime import ParentLink
link = ParentLink()
child = subprocess.Popen(
    [sys.executable, "-c", os.environ["CHILD"]],
    pass_fds=link.pass_fds,
    env={**os.environ, **link.environment},
)
child.wait()
"""
DRAINING_CHILD = """
import os
from tidemill.service.runtime import Drain, exit_with_parent
with Drain() as drain:
    assert exit_with_parent(grace_seconds=600)
    print(os.getpid(), flush=True)
    drain.draining.wait()
    print("drained", flush=True)
"""
HANGING_CHILD = """
import os, signal, time
from tidemill.service.runtime import exit_with_parent
signal.signal(signal.SIGTERM, signal.SIG_IGN)
exit_with_parent(grace_seconds=0.05)
print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_a_child_drains_when_its_parent_is_killed() -> None:
    with python(PARENT, CHILD=DRAINING_CHILD) as parent:
        child = int(read_line(parent))
        assert not is_gone(child)
        parent.kill()
        assert read_line(parent) == "drained"
        wait_until(lambda: is_gone(child))


def test_a_child_that_does_not_drain_is_ended_after_its_grace() -> None:
    with python(PARENT, CHILD=HANGING_CHILD) as parent:
        child = int(read_line(parent))
        parent.kill()
        wait_until(lambda: is_gone(child))


def test_closing_the_link_lets_the_children_go() -> None:
    link = ParentLink()
    with subprocess.Popen(
        [sys.executable, "-c", HANGING_CHILD],
        pass_fds=link.pass_fds,
        env={**os.environ, **link.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        read_line(child)
        link.close()
        assert child.wait(30) == ORPHANED_STATUS


def test_a_process_without_a_link_watches_nobody() -> None:
    threads = threading.active_count()
    assert not exit_with_parent()
    assert threading.active_count() == threads


def test_a_crash_plan_is_due_at_exactly_the_named_pass() -> None:
    plan = CrashPlan({"dispatch.after": 1, "append.before": 3})
    assert [plan.is_due("append.before") for _ in range(5)] == [False, False, True, False, False]
    assert plan.is_due("dispatch.after")
    assert not plan.is_due("elsewhere")


PASSING = """
import atexit
from tidemill.service.runtime import crash_point
atexit.register(print, "cleaned up", flush=True)
for number in range(5):
    print(number, flush=True)
    crash_point("loop")
"""


@pytest.mark.parametrize(
    ("crash_at", "status", "output"),
    [
        ("loop", CRASH_STATUS, "0"),
        ("other,loop:3", CRASH_STATUS, "0 1 2"),
        ("other", 0, "0 1 2 3 4 cleaned up"),
        ("", 0, "0 1 2 3 4 cleaned up"),
    ],
)
def test_a_process_dies_at_its_crash_point_without_cleaning_up(
    crash_at: str, status: int, output: str
) -> None:
    with python(PASSING, TIDEMILL_CRASH_AT=crash_at) as process:
        stdout, _ = process.communicate(timeout=30)
    assert (process.returncode, stdout.split()) == (status, output.split())


def test_a_malformed_crash_point_stops_the_process_with_its_cause() -> None:
    with python(PASSING, TIDEMILL_CRASH_AT="loop:soon") as process:
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "TIDEMILL_CRASH_AT" in stderr
