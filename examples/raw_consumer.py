"""Take every ended job of a tenant from its back door, with redis-py and msgpack alone.

The back door is a stream with one entry for each job that has ended.  Open it first:

    tidemill tenant set TENANT --back-door 100000      (entries kept; older ones are trimmed)

This program reads it as a consumer group does, so several of them share the work:

    1. XGROUP CREATE   makes the group once, from the first entry on.
    2. XREADGROUP ... 0   reads what this consumer got in an earlier life and never acknowledged.
    3. XAUTOCLAIM   takes over what consumers that are gone have left behind.
    4. XREADGROUP ... >   waits for new entries.
    5. The job is handled first and acknowledged (XACK) afterwards.

So each job is seen at least once, whatever dies in between, and sometimes twice: handle it in a
way that may be repeated, for example by writing under the job's id.  Give each process a name of
its own that it keeps over restarts.

Each job is printed as one line of JSON.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

Fields = dict[bytes, bytes]

#: Entries in one round trip.
COUNT = 64
#: How long one XREADGROUP waits for new entries.
BLOCK_MS = 2_000
#: An entry that its consumer has not acknowledged for so long is anybody's.
ABANDONED_MS = 60_000
#: How long to wait before the next try while the server is away.
RECONNECT_SECONDS = 0.5


class Consumer:
    """One member of a consumer group on the back door of a tenant."""

    def __init__(self, client: redis.Redis, shard: str, tenant: str, group: str, name: str) -> None:
        # redis-py types a reply as the union of what it is under any setting of the client.
        self.client: Any = client
        self.shard = shard
        # All keys of a shard carry its name in braces, so that a cluster keeps them together.
        self.prefix = f"tm:{{{shard}}}:"
        self.stream = f"{self.prefix}out:{tenant}"
        self.group = group
        self.name = name

    def run(self) -> None:
        """Handle jobs until interrupted; goes on when the server comes back."""
        while True:
            try:
                check_shard(self.client, self.shard)
                self.join_group()
                self.work()
            except redis.AuthenticationError:
                raise  # a connection error to redis-py, but trying again would not help
            except (redis.ConnectionError, redis.TimeoutError) as error:
                print(f"the server is away: {error}", file=sys.stderr)
                time.sleep(RECONNECT_SECONDS)
            except redis.ResponseError as error:
                # The stream ends a week after its last entry, and the group with it.
                if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                    raise

    def join_group(self) -> None:
        """Make the group unless it is there already."""
        try:
            # "0": what ended before the group was made counts too.
            self.client.xgroup_create(self.stream, self.group, id="0", mkstream=True)
        except redis.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    def work(self) -> None:
        """First what was left, then what comes."""
        for entry_id, fields in self.own_pending():
            self.take(entry_id, fields)
        last_claim = 0.0
        while True:
            if time.monotonic() - last_claim > ABANDONED_MS / 1000:
                for entry_id, fields in self.abandoned():
                    self.take(entry_id, fields)
                last_claim = time.monotonic()
            for entry_id, fields in self.read(">"):
                self.take(entry_id, fields)

    def own_pending(self) -> Iterator[tuple[bytes, Fields]]:
        """Yield what this consumer was given and has not acknowledged."""
        start = "0"
        while entries := self.read(start):
            yield from entries
            start = entries[-1][0].decode()

    def abandoned(self) -> Iterator[tuple[bytes, Fields]]:
        """Yield what others were given long ago and have not acknowledged; it is ours now."""
        cursor = "0-0"
        while True:
            # The cursor matters: without it the scan would begin with fresh entries each time.
            cursor, entries, *_ = self.client.xautoclaim(
                self.stream, self.group, self.name, ABANDONED_MS, cursor, count=COUNT
            )
            yield from entries
            if cursor in (b"0-0", "0-0"):
                return

    def read(self, start: str) -> list[tuple[bytes, Fields]]:
        """Read new entries (">") or own pending ones after an entry id."""
        reply = self.client.xreadgroup(
            self.group, self.name, {self.stream: start}, count=COUNT, block=BLOCK_MS
        )
        return list(reply[0][1]) if reply else []

    def take(self, entry_id: bytes, fields: Fields) -> None:
        """Handle one entry, then acknowledge it."""
        # A pending entry that was trimmed meanwhile has lost its fields.
        if fields:
            print(json.dumps(self.describe(fields)), flush=True)
        self.client.xack(self.stream, self.group, entry_id)

    def describe(self, fields: Fields) -> dict[str, object]:
        """Return what there is to know of an ended job."""
        job_id = fields[b"j"].decode()
        return {
            "job": job_id,
            "state": fields[b"s"].decode(),  # done, failed, cancelled, expired or dead
            "reason": fields[b"r"].decode(),  # stop, length, deadline, ...
            "tokens": int(fields[b"n"]),
            "batch": fields[b"b"].decode(),
            "idempotency_key": fields[b"k"].decode(),
            "ended_ms": int(fields[b"t"]),
            "text": self.text_of(job_id),
        }

    def text_of(self, job_id: str) -> str | None:
        """Return a job's output; None if it is not kept any more (24 hours after the end)."""
        stored = self.client.hget(f"{self.prefix}j:{job_id}", "res")
        if stored is not None:
            return str(unpack(stored).get("text", ""))
        # A job that its worker did not end has no stored result: its token log is the result.
        log = self.client.xrange(f"{self.prefix}o:{job_id}")
        if not any(b"e" in entry for _, entry in log):
            return None
        return "".join(unpack(entry[b"d"]).get("text", "") for _, entry in log if b"d" in entry)


def check_shard(client: Any, shard: str) -> None:
    """Exit unless a scheduler has ever led the shard: nobody would answer on another one."""
    try:
        if client.exists(f"tm:{{{shard}}}:sche"):
            return
    except redis.exceptions.NoPermissionError:
        return  # this user may not look
    raise SystemExit(f"no scheduler has ever run for shard {shard}: is --shard right?")


def unpack(message: bytes) -> dict[str, Any]:
    """Read one message of Tidemill: a version byte, then msgpack; fields at their default lack."""
    if message[0] != 1:
        raise SystemExit(f"this program reads version 1 of the messages, not {message[0]}")
    fields: dict[str, Any] = msgpack.unpackb(message[1:])
    return fields


def shard_name(text: str) -> str:
    """Read the name of a shard: two hex digits, in lower case."""
    if not re.fullmatch("[0-9a-f]{2}", text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not two hex digits such as 00")
    return text


def tenant_name(text: str) -> str:
    """Read the name of a tenant."""
    if not re.fullmatch(r"[A-Za-z0-9_.\-]{1,64}", text):
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not 1 to 64 letters, digits, dots, dashes and underscores"
        )
    return text


def server_url(text: str) -> str:
    """Read the server's address."""
    try:
        redis.Redis.from_url(text).close()
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}") from error
    return text


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "url",
        type=server_url,
        help="such as redis://localhost:6379/0 or unix:///path/to/socket",
    )
    parser.add_argument(
        "--tenant", type=tenant_name, default="default", help="whose jobs (default: %(default)s)"
    )
    parser.add_argument(
        "--shard", type=shard_name, default="00", help="two hex digits (default: %(default)s)"
    )
    parser.add_argument("--group", default="results", help="consumer group (default: %(default)s)")
    parser.add_argument("--name", default="c1", help="this consumer, unique (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    """Consume until Ctrl-C."""
    args = parse_args()
    # No retries inside the client: a lost reply to XREADGROUP has given us entries that only a look
    # at our pending ones brings back, which is how `run` begins anew.
    once = Retry(NoBackoff(), 0)
    timeout = BLOCK_MS / 1000 + 5
    with redis.Redis.from_url(args.url, protocol=2, retry=once, socket_timeout=timeout) as client:
        Consumer(client, args.shard, args.tenant, args.group, args.name).run()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (redis.RedisError, OSError) as error:
        raise SystemExit(f"the server refuses: {error}") from None
