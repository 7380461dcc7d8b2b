"""The crash matrix, rows of the connection: a request or its reply never arrives."""

from collections.abc import Iterator

import pytest

from support.crash_stage import NUM_JOBS, CrashStage
from support.forwarder import Forwarder, Loss
from support.recorder import plan_jobs
from tidemill.service.broker import EmbeddedBroker


@pytest.fixture
def forwarder(valkey_server: EmbeddedBroker) -> Iterator[Forwarder]:
    with Forwarder(str(valkey_server.settings.socket_path)) as forwarder:
        yield forwarder


@pytest.mark.parametrize("loss", ["request", "reply"])
@pytest.mark.parametrize("function", ["claim", "append", "finish", "beat"])
def test_a_message_lost_by_a_worker_changes_nothing(
    stage: CrashStage, forwarder: Forwarder, loss: Loss, function: str
) -> None:
    jobs = plan_jobs(NUM_JOBS)
    stage.leader()
    stage.worker(url=forwarder.url)
    # Its connection makes the call again once by itself.
    forwarder.lose(loss, f"_{function}".encode(), times=2)

    stage.expect_success(stage.producer(jobs))

    stage.wait(lambda: forwarder.has_lost, "something was lost")
    stage.judge(jobs)
    assert stage.fences() == {1}


@pytest.mark.parametrize("loss", ["request", "reply"])
@pytest.mark.parametrize("function", ["dispatch", "lead"])
def test_a_message_lost_by_the_leader_changes_nothing(
    stage: CrashStage, forwarder: Forwarder, loss: Loss, function: str
) -> None:
    jobs = plan_jobs(NUM_JOBS)
    stage.worker()
    stage.leader(url=forwarder.url)
    forwarder.lose(loss, f"_{function}".encode())

    stage.expect_success(stage.producer(jobs))

    stage.wait(lambda: forwarder.has_lost, "something was lost")
    stage.judge(jobs)
    assert stage.fences() == {1}


@pytest.mark.parametrize("loss", ["request", "reply"])
def test_a_message_lost_around_submit_makes_no_second_job(
    stage: CrashStage, forwarder: Forwarder, loss: Loss
) -> None:
    jobs = plan_jobs(NUM_JOBS)
    stage.leader()
    stage.worker()
    forwarder.lose(loss, b"_submit")

    stage.expect_success(stage.producer(jobs, url=forwarder.url))

    assert forwarder.has_lost
    stage.judge(jobs)
