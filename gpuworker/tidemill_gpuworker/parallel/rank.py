"""A rank that follows: ``python -m tidemill_gpuworker.parallel.rank FD``, started by ``Team``."""

import os

# Before torch is imported, as in the leader.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import ctypes
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1
_log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Do what the leader orders until it is gone; returns the exit status."""
    # The leader drains, for which it needs its ranks; the end of the channel ends them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _die_with_leader()
    # Imported here: until torch is there, nothing else would see that the leader is gone.
    from tidemill.protocol.errors import EngineFailed, TidemillError
    from tidemill.service.log import setup_logging
    from tidemill_gpuworker.parallel.channel import Channel
    from tidemill_gpuworker.parallel.follower import Follower
    from tidemill_gpuworker.parallel.orders import DONE

    setup_logging("INFO", "rank")
    channel = Channel(socket.socket(fileno=int(arguments[0])), "the leader")
    try:
        _, fields = channel.receive()
        _check_parent(fields)
        channel.send(DONE)
        Follower(channel, fields).run()
    except EngineFailed as error:
        _log.info("leaving: %s", error)
        return 0
    except TidemillError as error:
        _log.error("%s", error.one_line())
    return 1


def _die_with_leader() -> None:
    # A rank that was stopped cannot see its channel close, but the kernel can end it.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _check_parent(fields: dict[str, Any]) -> None:
    # It may have gone before we asked to go with it; the channel then says so as well.
    if os.getppid() != fields["parent"]:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
