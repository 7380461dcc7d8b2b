"""Commands are read in order and once, whatever else is in the stream."""

from collections.abc import Sequence

import pytest
import redis

from support.shard import KEYS
from tidemill.protocol import calls
from tidemill.protocol.codec import pack
from tidemill.protocol.functions import run
from tidemill.protocol.messages import CommandKind
from tidemill_gpuworker.shell.commands import Command, CommandReader, parse_command

STREAM = KEYS.commands("wkr_a")

pytestmark = pytest.mark.leaks_keys


class Handler:
    """Keeps what it is given; raises as often as told."""

    def __init__(self) -> None:
        self.seen: list[Command] = []
        self.num_failures = 0

    def __call__(self, commands: Sequence[Command]) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise redis.ConnectionError("the claims cannot be loaded")
        self.seen += commands


def _run(client: redis.Redis, job_id: str) -> None:
    client.xadd(STREAM, {"k": "run", "j": job_id, "f": 1})


def test_commands_come_in_order(redis_client: redis.Redis) -> None:
    handler = Handler()
    reader = CommandReader(redis_client, STREAM, handler, block_ms=10)
    reader.read()
    assert handler.seen == []
    for name in "abc":
        _run(redis_client, name)
    redis_client.xadd(STREAM, {"k": "cancel", "j": "a", "f": 1})
    redis_client.xadd(STREAM, {"k": "drain"})
    reader.read()
    reader.read()
    assert [command.job_id for command in handler.seen] == ["a", "b", "c", "a", ""]
    assert [command.kind for command in handler.seen[3:]] == [CommandKind.CANCEL, CommandKind.DRAIN]
    assert reader.cursor == handler.seen[-1].entry_id


def test_commands_that_could_not_be_handled_are_read_again(redis_client: redis.Redis) -> None:
    handler = Handler()
    handler.num_failures = 1
    reader = CommandReader(redis_client, STREAM, handler, block_ms=10)
    _run(redis_client, "a")
    with pytest.raises(redis.ConnectionError):
        reader.read()
    reader.read()
    reader.read()
    assert [command.job_id for command in handler.seen] == ["a"]


def test_entries_that_make_no_sense_are_passed_over(redis_client: redis.Redis) -> None:
    handler = Handler()
    reader = CommandReader(redis_client, STREAM, handler, block_ms=10)
    redis_client.xadd(STREAM, {"k": "dance"})
    redis_client.xadd(STREAM, {"k": "run", "j": "a"})
    redis_client.xadd(STREAM, {"k": "run", "j": "a", "f": "many"})
    for hints in (b"", b"\xc1", pack([]), pack({b"short": 1}), pack({b"8 bytes!": -1})):
        redis_client.xadd(STREAM, {"k": "hint", "h": hints})
    last = redis_client.xadd(STREAM, {"x": "y"})
    reader.read()
    assert handler.seen == []
    assert isinstance(last, bytes) and reader.cursor == last.decode()


def test_a_command_is_parsed_from_its_fields() -> None:
    fields = {b"k": b"run", b"j": b"job_1", b"f": b"7"}
    assert parse_command(b"5-1", fields) == Command("5-1", CommandKind.RUN, "job_1", 7)


def test_a_hint_tells_of_prefixes_and_the_jobs_that_wait_for_them(
    redis_client: redis.Redis,
) -> None:
    handler = Handler()
    reader = CommandReader(redis_client, STREAM, handler, block_ms=10)
    refs = {b"8 bytes!": 3, bytes(8): 0}
    _run(redis_client, "a")
    assert run(redis_client, calls.hint(KEYS, worker_id="wkr_a", refs=refs))
    reader.read()
    assert handler.seen[1] == Command(reader.cursor, CommandKind.HINT, refs=refs)
