"""The life of a set of jobs in stages, each beside plain commands that carry the same bytes.

A plain pipeline is what a queue without fences, leases, counters and results would send: its rate
is the price of storing the bytes, the ratio to it the price of the promises.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import redis
from queue_meter import Command, Sample, Server

from tidemill.protocol import calls
from tidemill.protocol.calls import JobRef
from tidemill.protocol.codec import encode
from tidemill.protocol.functions import Call, run
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.keys import CONSUMER, GROUP, ShardKeys
from tidemill.protocol.messages import GenerateRequest, JobEnd, JobResult, TokenChunk, Usage
from tidemill.protocol.sampling import SamplingParams

T = TypeVar("T")

KEYS = ShardKeys()
QUEUE = "p1:default"
WORKER = "wkr_benchmark"
#: Most jobs that a function takes in one call.
MAX_PER_CALL = 256
#: Commands or jobs in one round trip, so that every row has the same batching.
PER_TRIP = 256
LEASE_MS = 600_000
PROMPT_BYTES = 2000
CHUNK_BYTES = 160
TOKENS_PER_CHUNK = 16
CHUNKS_PER_RESULT = 10


@dataclass(frozen=True, slots=True)
class Stage:
    """Calls that move ``num`` jobs on, and the plain commands that stand beside them."""

    name: str
    calls: Sequence[Call[Any]]
    num: int
    plain: Sequence[Command]
    accept: Callable[[Any], bool]

    def run_calls(self, server: Server) -> Sample:
        """Make the calls; raises ``RuntimeError`` unless every job moved on."""
        per_call = self.num // len(self.calls)
        commands = [call.command for call in self.calls]
        sample, replies = server.send(commands, max(1, PER_TRIP // per_call), self.num)
        for call, reply in zip(self.calls, replies, strict=True):
            if not self.accept(call.parse(reply)):
                raise RuntimeError(f"{self.name}: the server refused a job: {reply!r}")
        return sample

    def run_plain(self, server: Server) -> Sample:
        """Send the plain commands; as many operations as there are jobs."""
        per_trip = PER_TRIP * len(self.plain) // self.num
        return server.send(self.plain, per_trip, self.num)[0]


class JobSet:
    """Jobs that all pass the same stages; makes the calls of each."""

    def __init__(self, num: int) -> None:
        self.ids = [new_job_id() for _ in range(num)]
        self.request = make_request()
        self.request_bytes = encode(self.request)
        self.fences: list[int] = []
        self.num_chunks = 0

    def submit(self) -> Stage:
        """Accept every job."""
        made = [
            calls.submit(KEYS, calls.NewJob(job_id, self.request, cost=500, num_tokens=756))
            for job_id in self.ids
        ]
        plain: list[Command] = [
            ("XADD", "plain:in", "*", "j", job_id, "d", self.request_bytes) for job_id in self.ids
        ]
        return self._stage("submit", made, plain, lambda reply: reply.created)

    def dispatch(self, client: redis.Redis, epoch: int) -> Stage:
        """Give every job to a worker, after the scheduler has read all pointers."""
        made = [
            calls.dispatch(
                KEYS,
                job_id=job_id,
                queue=QUEUE,
                entry_id=entry_id,
                worker_id=WORKER,
                epoch=epoch,
                lease_ms=LEASE_MS,
            )
            for job_id, entry_id in read_pointers(client, KEYS.ingress(QUEUE))
        ]
        plain: list[Command] = []
        for job_id, entry_id in read_pointers(client, "plain:in"):
            plain += [("XACK", "plain:in", GROUP, entry_id), ("XDEL", "plain:in", entry_id)]
            plain.append(("XADD", "plain:w", "MAXLEN", "~", 10_000, "*", "j", job_id))
        return self._stage("dispatch", made, plain, lambda reply: reply.fence > 0)

    def append(self, per_call: int) -> Stage:
        """Write one more chunk of every running job, ``per_call`` jobs a call."""
        chunk = make_chunk(self.num_chunks)
        triples = [(job_id, 1, chunk) for job_id in self.ids]
        made = [
            calls.append(KEYS, worker_id=WORKER, chunks=part) for part in parts(triples, per_call)
        ]
        body = encode(chunk)
        plain: list[Command] = []
        for index in range(len(self.ids)):
            plain += [
                ("XADD", f"plain:o:{index}", "*", "d", body),
                ("SPUBLISH", f"plain:c:{index}", body),
            ]
        self.num_chunks += 1
        name = f"append x{per_call}"
        return self._stage(name, made, plain, lambda reply: all(one.accepted for one in reply))

    def beat(self) -> Stage:
        """Renew every lease."""
        made = [
            calls.beat(
                KEYS,
                worker_id=WORKER,
                model=self.request.model,
                tokenizer_digest="digest",
                lease_ms=LEASE_MS,
                jobs=part,
            )
            for part in parts([(job_id, 1) for job_id in self.ids], MAX_PER_CALL)
        ]
        plain: list[Command] = [("ZADD", "plain:run", 1.0, job_id) for job_id in self.ids]
        return self._stage("beat", made, plain, lambda reply: not reply.lost)

    def finish(self) -> Stage:
        """End every job with a last chunk and the stored result."""
        chunk, result = make_chunk(self.num_chunks), make_result(self.num_chunks)
        made = [
            calls.finish(
                KEYS, JobRef(job_id, QUEUE), fence=1, worker_id=WORKER, chunk=chunk, result=result
            )
            for job_id in self.ids
        ]
        body, stored, plain = encode(chunk), encode(result), list[Command]()
        for index in range(len(self.ids)):
            plain += [
                ("XADD", f"plain:o:{index}", "*", "d", body),
                ("SET", f"plain:r:{index}", stored, "PX", 86_400_000),
                ("SPUBLISH", f"plain:c:{index}", body),
            ]
        return self._stage("finish", made, plain, lambda reply: reply.accepted)

    def _stage(
        self,
        name: str,
        made: Sequence[Call[Any]],
        plain: Sequence[Command],
        accept: Callable[[Any], bool],
    ) -> Stage:
        return Stage(name, made, len(self.ids), plain, accept)


#: What each stage is compared with, in words.
PLAIN_TITLES = {
    "submit": "XADD of the request",
    "dispatch": "XACK + XDEL + XADD of a command",
    "append": "XADD + SPUBLISH of the chunk",
    "beat": "ZADD",
    "finish": "XADD + SPUBLISH of the chunk, SET of the result",
}


def prepare(client: redis.Redis) -> int:
    """Give an empty server a salt, the plain queue's group and a leader; returns its epoch."""
    run(client, calls.salt(KEYS, tenant="default", random=b"\x07" * 16))
    client.xgroup_create("plain:in", GROUP, "0", mkstream=True)
    return run(client, calls.lead(KEYS, scheduler_id="sch_benchmark", lease_ms=LEASE_MS))


def read_pointers(client: redis.Redis, stream: str) -> list[tuple[str, str]]:
    """Read a stream as its only consumer: (job id, entry id) of every entry."""
    pointers: list[tuple[str, str]] = []
    while reply := cast(Any, client.xreadgroup(GROUP, CONSUMER, {stream: ">"}, count=1000)):
        for entry_id, fields in reply[0][1]:
            pointers.append((fields[b"j"].decode(), entry_id.decode()))
    return pointers


def make_request() -> GenerateRequest:
    """A request with a text prompt of 2 kB."""
    prompt = ("The tide turns the mill. " * (PROMPT_BYTES // 25 + 1))[:PROMPT_BYTES]
    params = SamplingParams(max_tokens=256, seed=1)
    return GenerateRequest(model="benchmark", prompt=prompt, params=params)


def make_chunk(number: int) -> TokenChunk:
    """The chunk of that number in a job's log, 160 bytes when encoded."""
    start = number * TOKENS_PER_CHUNK
    ids = tuple(range(20_000, 20_000 + TOKENS_PER_CHUNK))
    bare = TokenChunk(start=start, end=start + TOKENS_PER_CHUNK, ids=ids, text="-" * 32)
    text = "-" * (32 + CHUNK_BYTES - len(encode(bare)))
    return bare.model_copy(update={"text": text})


def make_result(num_chunks: int) -> JobResult:
    """The result of a job with so many chunks and one last."""
    chunks = [make_chunk(number) for number in range(num_chunks + 1)]
    ids = tuple(token for chunk in chunks for token in chunk.ids)
    usage = Usage(prompt_tokens=500, completion_tokens=len(ids))
    return JobResult(
        end=JobEnd(state="done", finish_reason="length", usage=usage),
        ids=ids,
        text="".join(chunk.text for chunk in chunks),
        entries=tuple((chunk.end, len(chunk.text)) for chunk in chunks),
    )


def parts(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Split a sequence into parts of ``size``."""
    return [items[start : start + size] for start in range(0, len(items), size)]
