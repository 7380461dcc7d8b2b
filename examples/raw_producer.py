"""Submit a prompt and print the answer as it comes, with redis-py and msgpack alone.

A job goes in by the front door, a stream that any client may add to:

    1. XADD tm:{00}:front * v 1 body {"request": {...}, "terms": {...}, "idempotency_key": "..."}
    2. BLPOP tm:{00}:fr:<entry id>   waits for the answer, {"job": id} or {"error": ...}.

``request`` holds one of prompt, prompt_ids and messages, and if you like model, params, tenant,
priority; ``terms`` delay_ms, deadline_ms, batch and so on; docs/redis-keys.md lists them all.
With an ``idempotency_key`` a producer that died in between may do both steps again and gets the
same job.

The tokens are read from the job's log, a stream that grows while the job runs; its channel only
repeats what is added, so that nobody has to poll:

    3. SSUBSCRIBE tm:{00}:c:<job>   first, so that nothing is missed between the two.
    4. XRANGE tm:{00}:o:<job>   reads the log.
    5. A message that begins where we are is taken, one that ends before is known already, and any
       other one, a lost connection, or silence for a while sends us back to step 4.
    6. The log is complete when an entry has the field e.

So every token is printed once, whatever breaks.
"""

import argparse
import json
import re
import sys
import time
import uuid
from typing import Any

import msgpack
import redis

#: How long to wait for the scheduler's answer, and for the next message before a look at the log.
ANSWER_SECONDS = 30
SILENCE_SECONDS = 1.5
RECONNECT_SECONDS = 0.2
#: Log entries in one round trip.
COUNT = 512

LOST = (redis.ConnectionError, redis.TimeoutError)


class TokenReader:
    """Follows one job's output; ``position`` tokens and ``num_chars`` of their text are printed."""

    def __init__(self, client: redis.Redis, prefix: str, job_id: str) -> None:
        # redis-py types a reply as the union of what it is under any setting of the client.
        self.client: Any = client
        self.job = f"{prefix}j:{job_id}"
        self.log = f"{prefix}o:{job_id}"
        self.channel = f"{prefix}c:{job_id}"
        self.position = 0
        self.num_chars = 0
        self.end: dict[str, Any] | None = None

    def follow(self) -> dict[str, Any]:
        """Print the output to its end; returns how the job ended."""
        while self.end is None:
            try:
                with self.client.pubsub() as channel:
                    channel.ssubscribe(self.channel)
                    self.listen(channel)
            except LOST as error:
                print(f"\nthe server is away: {error}", file=sys.stderr)
                time.sleep(RECONNECT_SECONDS)
        return self.end

    def listen(self, channel: Any) -> None:
        """Take messages; whatever else happens is a reason to read the log."""
        while self.end is None:
            message = channel.get_message(timeout=SILENCE_SECONDS)
            # The first message confirms the subscription: what came before it is in the log only.
            if message is None or message["type"] != "smessage" or not self.take(message["data"]):
                self.read_log()

    def take(self, data: bytes) -> bool:
        """Take one message, "<entry id> <chunk>"; false if the log must be read."""
        _, _, chunk = data.partition(b" ")
        # The message that ends the log has no chunk.
        return bool(chunk) and self.take_chunk(unpack(chunk))

    def take_chunk(self, chunk: dict[str, Any]) -> bool:
        """Print a chunk if it comes next; false if the log must be read."""
        if chunk["start"] == self.position:
            self.show(chunk.get("text", ""), chunk["end"])
            return True
        return bool(chunk["end"] <= self.position)

    def show(self, text: str, position: int) -> None:
        """Print what is new."""
        print(text, end="", flush=True)
        self.num_chars += len(text)
        self.position = max(self.position, position)

    def read_log(self) -> None:
        """Read the log and take what is new: what we have printed is the beginning of its text."""
        # The state first: a job that has ended and whose log lacks its end has lost it to time.
        state = self.client.hget(self.job, "st")
        text, position, start = "", 0, "-"
        while entries := self.client.xrange(self.log, start, "+", count=COUNT):
            # d holds tokens, e the end; the mark that a worker has begun has neither.
            for _, fields in entries:
                if b"d" in fields:
                    chunk = unpack(fields[b"d"])
                    text, position = text + chunk.get("text", ""), chunk["end"]
                if b"e" in fields:
                    self.end = unpack(fields[b"e"])
            start = f"({entries[-1][0].decode()}"
        if self.end is None and state not in (b"delayed", b"queued", b"run"):
            text, position = self.stored_result()
        self.show(text[self.num_chars :], position)

    def stored_result(self) -> tuple[str, int]:
        """Return text and length of the result, which outlives the log."""
        stored = self.client.hget(self.job, "res")
        if stored is None:
            raise SystemExit("the job is not known any more")
        result = unpack(stored)
        self.end = result["end"]
        return result.get("text", ""), len(result.get("ids", ()))


def submit(client: Any, prefix: str, body: dict[str, Any]) -> str:
    """Put a job at the front door and return its id; may be repeated with the same body."""
    entry_id = client.xadd(f"{prefix}front", {"v": "1", "body": json.dumps(body)})
    answer = client.blpop([f"{prefix}fr:{entry_id.decode()}"], timeout=ANSWER_SECONDS)
    if answer is None:
        raise SystemExit(f"no scheduler has answered within {ANSWER_SECONDS} s: is one running?")
    said = json.loads(answer[1])
    if "error" in said:
        raise SystemExit(f"refused: {said['error']}")
    return str(said["job"])


def submit_patiently(client: redis.Redis, shard: str, body: dict[str, Any]) -> str:
    """Submit, and again while the server is away: the idempotency key makes that one job."""
    while True:
        try:
            check_shard(client, shard)
            return submit(client, f"tm:{{{shard}}}:", body)
        except redis.AuthenticationError:
            raise  # a connection error to redis-py, but trying again would not help
        except LOST as error:
            print(f"the server is away: {error}", file=sys.stderr)
            time.sleep(RECONNECT_SECONDS)


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
    parser.add_argument("prompt", help="text; or token ids such as 1,2,3 with --ids")
    parser.add_argument("--ids", action="store_true", help="the prompt is token ids")
    parser.add_argument("--max-tokens", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument(
        "--tenant",
        type=tenant_name,
        default="default",
        help="on whose behalf (default: %(default)s)",
    )
    parser.add_argument(
        "--shard", type=shard_name, default="00", help="two hex digits (default: %(default)s)"
    )
    parser.add_argument("--deadline-ms", type=int, default=0, help="0: none (default)")
    parser.add_argument("--key", help="idempotency key (default: a random one)")
    return parser.parse_args()


def make_body(args: argparse.Namespace) -> dict[str, Any]:
    """Return the job as the front door takes it."""
    prompt = {"prompt": args.prompt}
    if args.ids:
        prompt = {"prompt_ids": [int(token) for token in args.prompt.split(",")]}
    params = {"max_tokens": args.max_tokens, "temperature": 0.0}
    return {
        "request": {**prompt, "params": params, "tenant": args.tenant},
        "terms": {"deadline_ms": args.deadline_ms},
        "idempotency_key": args.key or uuid.uuid4().hex,
    }


def main() -> None:
    """Submit, follow, and tell on standard error how the job ended."""
    args = parse_args()
    prefix = f"tm:{{{args.shard}}}:"
    # A blocking command must not take longer than the socket's timeout.
    timeout = ANSWER_SECONDS + 5
    with redis.Redis.from_url(args.url, protocol=2, socket_timeout=timeout) as client:
        job_id = submit_patiently(client, args.shard, make_body(args))
        reader = TokenReader(client, prefix, job_id)
        end = reader.follow()
    print(f"\n{job_id}: {end['state']} after {reader.position} tokens", file=sys.stderr)
    if end["state"] != "done":
        raise SystemExit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (redis.RedisError, OSError) as error:
        raise SystemExit(f"the server refuses: {error}") from None
