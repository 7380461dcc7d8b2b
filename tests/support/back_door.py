"""A consumer of a tenant's ended jobs that delivers each of them before it acknowledges it."""

from contextlib import suppress
from pathlib import Path

import redis

from tidemill.service.redis import connect
from tidemill.service.runtime import crash_point

GROUP = "tests"


def main(url: str, stream: str, delivered: str) -> int:
    """Deliver, one line per job, what is there; what an earlier life left unacknowledged first."""
    with connect(url) as client, Path(delivered).open("a") as file:
        with suppress(redis.ResponseError):  # an earlier life made it
            client.xgroup_create(stream, GROUP, id="0")
        for start in ("0", ">"):
            reply = client.xreadgroup(GROUP, "c", {stream: start}, count=1000)
            for entry, fields in reply[0][1] if reply else ():
                print(fields[b"j"].decode(), file=file, flush=True)
                crash_point("test.before_ack")
                client.xack(stream, GROUP, entry)
    return 0
