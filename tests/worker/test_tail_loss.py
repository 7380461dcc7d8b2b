"""A server that comes back without its last second: logs are repaired, no job has two writers.

The server's append-only file is cut where it ended a while ago, which is what a crash under
``appendfsync everysec`` or the promotion of a lagging replica leaves.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from support import shard
from support.fake_engine import generate
from support.shard import KEYS, read_log
from support.valkey import require_server_binary
from support.wait import wait_until
from support.worker_rig import Rig, make_request, result_of, state_of, submit
from tidemill.protocol.functions import ensure_library
from tidemill.service.embedded_broker import EmbeddedBroker
from tidemill.service.redis import connect

PROMPT = (4, 5, 6)


class Forgetful:
    """A real server that can be sent back to an earlier moment of its life."""

    def __init__(self, broker: EmbeddedBroker, client: redis.Redis) -> None:
        self._broker = broker
        self.client = client
        self.url = broker.url

    def mark(self) -> int:
        """This moment."""
        # Any write that was acknowledged is in the file, because it is synced each time.
        return self._file.stat().st_size

    def go_back_to(self, moment: int) -> None:
        """Die, lose what came after ``moment``, and start again."""
        os.kill(self._broker.pid, signal.SIGKILL)
        wait_until(lambda: not self._broker.is_running, what="the server is dead")
        os.truncate(self._file, moment)
        self._broker.restart()

    @property
    def _file(self) -> Path:
        (path,) = self._broker.settings.data_dir.rglob("*.incr.aof")
        return path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Forgetful]:
    binary = require_server_binary()
    with (
        EmbeddedBroker.start(tmp_path, fsync="always", binary=binary) as broker,
        connect(broker.url) as client,
    ):
        ensure_library(client)
        yield Forgetful(broker, client)


@pytest.fixture
def rig(server: Forgetful) -> Iterator[Rig]:
    epoch = shard.lead(server.client)
    rig = Rig(server.client, server.url, epoch, config={"lease_seconds": 30.0})
    with rig.running():
        yield rig


def _tokens_in_log(client: redis.Redis, job_id: str) -> int:
    return int(client.hget(KEYS.job(job_id), "n") or 0)


def _check_done(client: redis.Redis, job_id: str, num_tokens: int) -> None:
    expected = generate(PROMPT, num_tokens)
    log = read_log(client, job_id)
    assert (log.ids, log.terminals) == (expected, ["done"])
    assert list(result_of(client, job_id).ids) == expected


def test_tokens_that_the_server_lost_are_written_again(server: Forgetful, rig: Rig) -> None:
    job_id = rig.give(make_request(PROMPT, num_tokens=40))
    rig.runner.allow(5)
    rig.wait_for_tokens(job_id, 5)
    moment = server.mark()
    rig.runner.allow(20)
    rig.wait_for_tokens(job_id, 25)
    server.go_back_to(moment)
    assert _tokens_in_log(server.client, job_id) < 25
    rig.runner.run_free()
    rig.wait_for(job_id, "done")
    _check_done(server.client, job_id, 40)


def test_an_end_repairs_what_the_server_lost(server: Forgetful, rig: Rig) -> None:
    job_id = rig.give(make_request(PROMPT, num_tokens=10))
    rig.runner.allow(2)
    rig.wait_for_tokens(job_id, 2)
    moment = server.mark()
    rig.runner.allow(7)
    rig.wait_for_tokens(job_id, 9)
    server.go_back_to(moment)
    # The one step that is left makes the last token, which goes with the end.
    rig.runner.run_free()
    rig.wait_for(job_id, "done")
    _check_done(server.client, job_id, 10)


def test_a_fence_that_is_given_out_twice_lets_one_worker_write(server: Forgetful, rig: Rig) -> None:
    client = server.client
    job_id = submit(client, make_request(PROMPT, num_tokens=110))
    with Rig(client, server.url, rig.epoch).running() as second:
        moment = server.mark()
        assert rig.dispatch(job_id) == 1
        rig.runner.allow(12)
        rig.wait_for_tokens(job_id, 12)
        # Its next tokens, and nothing else, are to tell it that the job is not its any more.
        rig.process._threads["heartbeat"].close()
        server.go_back_to(moment)
        assert (state_of(client, job_id), _tokens_in_log(client, job_id)) == ("queued", 0)
        assert second.dispatch(job_id) == 1
        second.runner.allow(2)
        second.wait_for_tokens(job_id, 2)
        # The first worker still holds the job under the same fence, and has more to tell.
        rig.step_until(lambda: not rig.process._jobs.all())
        assert _tokens_in_log(client, job_id) == 2
        second.runner.run_free()
        second.wait_for(job_id, "done")
    claims = [fields[b"c"] for _, fields in client.xrange(KEYS.token_log(job_id)) if b"c" in fields]
    assert claims == [second.worker_id.encode()]
    _check_done(client, job_id, 110)


def test_a_job_that_the_server_forgot_is_dropped(server: Forgetful, rig: Rig) -> None:
    moment = server.mark()
    job_id = rig.give(make_request(PROMPT, num_tokens=100))
    rig.runner.allow(3)
    rig.wait_for_tokens(job_id, 3)
    server.go_back_to(moment)
    rig.runner.run_free()
    wait_until(lambda: not rig.process._jobs.all(), what="the job is dropped")
    assert not server.client.exists(KEYS.job(job_id), KEYS.token_log(job_id))
    healthy = rig.give(make_request(PROMPT))
    rig.wait_for(healthy, "done")


def test_a_worker_that_the_server_forgot_registers_again(server: Forgetful) -> None:
    epoch = shard.lead(server.client)
    moment = server.mark()
    with Rig(server.client, server.url, epoch).running() as rig:
        server.go_back_to(moment)
        wait_until(
            lambda: server.client.zscore(KEYS.workers, rig.worker_id) is not None,
            what="the worker is known again",
        )
        rig.runner.run_free()
        job_id = rig.give(make_request(PROMPT))
        rig.wait_for(job_id, "done")
        _check_done(server.client, job_id, 8)
