"""A scheduler and a worker for benchmarks of the gateway: tokens at a given pace, no engine.

The text of each token is when it was written, so that a reader knows how long it was under way.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import redis
import tokenizers

from tidemill.protocol import calls
from tidemill.protocol.calls import REF_FIELDS, JobRef
from tidemill.protocol.codec import WIRE_VERSION
from tidemill.protocol.functions import ensure_library, run
from tidemill.protocol.ids import new_worker_id
from tidemill.protocol.keys import CONSUMER, GROUP, ShardKeys
from tidemill.protocol.messages import (
    JobEnd,
    JobResult,
    ModelCard,
    TokenChunk,
    Usage,
    WorkerInfo,
)
from tidemill.service.redis import connect
from tidemill.service.tokenizer import Tokenizer
from tidemill.service.tokenizer_files import TokenizerFiles

KEYS = ShardKeys()
MODEL = "mill"
LEASE_MS = 3_600_000
PROMPT = "a b c"
_TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
#: Jobs whose tokens go out in one call, as a worker's do.
_PER_CALL = 256


@dataclass
class Grist:
    """A job that was claimed."""

    job_id: str
    fence: int
    ref: JobRef
    text: str = ""
    position: int = 0

    def chunk(self, text: str) -> TokenChunk:
        """Return its next token."""
        return TokenChunk(start=self.position, end=self.position + 1, ids=(1,), text=text)


class Batch:
    """Jobs whose tokens fall due together, as those of one worker's batch do."""

    def __init__(self, due: float, pause_seconds: float) -> None:
        self.jobs: list[Grist] = []
        self._due = due
        self._pause_seconds = pause_seconds

    def take_due(self) -> list[Grist]:
        """Return the jobs if their tokens are due now, for once."""
        if time.monotonic() < self._due:
            return []
        self._due += self._pause_seconds
        return self.jobs


def batches(num: int, size: int, pause_seconds: float) -> list[Batch]:
    """Return empty batches for so many jobs, which fall due one after the other within a pause."""
    now, count = time.monotonic(), max(1, math.ceil(num / size))
    return [Batch(now + pause_seconds * (1 + n / count), pause_seconds) for n in range(count)]


class Mill:
    """Leads the shard and is its only worker."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._worker_id = new_worker_id()
        ensure_library(client)
        self._register(_tokenizer())
        self._epoch = run(client, calls.lead(KEYS, scheduler_id="sch_mill", lease_ms=LEASE_MS))

    def serve(self, num_jobs: int, num_tokens: int, pause_seconds: float, size: int) -> None:
        """Take so many jobs as they come; a token at once, then one after each pause.

        Each joins the emptiest batch; a batch has ``size`` jobs at most.
        """
        groups, num_taken = batches(num_jobs, size, pause_seconds), 0
        while num_taken < num_jobs or any(group.jobs for group in groups):
            taken = self._take_all()
            self._write(taken)
            num_taken += len(taken)
            for group in groups:
                self._write(group.take_due())
            for job in taken:
                min(groups, key=lambda group: len(group.jobs)).jobs.append(job)
            for group in groups:
                group.jobs = [job for job in group.jobs if not self._is_over(job, num_tokens)]
            time.sleep(0.001)

    def _take_all(self) -> list[Grist]:
        queues = self._client.zrange(KEYS.active_queues, 0, -1)
        return [job for queue in queues for job in self._take(queue.decode())]

    def _write(self, jobs: Sequence[Grist]) -> None:
        for start in range(0, len(jobs), _PER_CALL):
            self._write_some(jobs[start : start + _PER_CALL])

    def _write_some(self, jobs: Sequence[Grist]) -> None:
        text = f"{time.monotonic():.6f} "
        chunks = [(job.job_id, job.fence, job.chunk(text)) for job in jobs]
        written = run(self._client, calls.append(KEYS, worker_id=self._worker_id, chunks=chunks))
        assert all(each.accepted for each in written), "a job was lost"
        for job in jobs:
            job.text += text
            job.position += 1

    def _is_over(self, job: Grist, num_tokens: int) -> bool:
        if job.position < num_tokens:
            return False
        self._finish(job, num_tokens)
        return True

    def _finish(self, job: Grist, num_tokens: int) -> None:
        usage = Usage(prompt_tokens=3, completion_tokens=num_tokens)
        end = JobEnd(state="done", finish_reason="length", usage=usage)
        size = len(job.text) // num_tokens
        entries = tuple((n + 1, size) for n in range(num_tokens))
        result = JobResult(end=end, ids=(1,) * num_tokens, text=job.text, entries=entries)
        call = calls.finish(
            KEYS,
            job.ref,
            fence=job.fence,
            worker_id=self._worker_id,
            chunk=TokenChunk(start=num_tokens, end=num_tokens),
            result=result,
        )
        assert run(self._client, call).accepted, "a job was lost"

    def _take(self, queue: str) -> list[Grist]:
        reply = self._client.xreadgroup(GROUP, CONSUMER, {KEYS.ingress(queue): ">"}, count=1000)
        entries = reply[0][1] if reply else []
        return [self._dispatch(queue, entry.decode(), fields[b"j"].decode())
                for entry, fields in entries]  # fmt: skip

    def _dispatch(self, queue: str, entry_id: str, job_id: str) -> Grist:
        call = calls.dispatch(
            KEYS,
            job_id=job_id,
            queue=queue,
            entry_id=entry_id,
            worker_id=self._worker_id,
            epoch=self._epoch,
            lease_ms=LEASE_MS,
        )
        fence = run(self._client, call).fence
        ref = JobRef.read(job_id, self._client.hmget(KEYS.job(job_id), REF_FIELDS))
        return Grist(job_id, fence, ref)

    def _register(self, tokenizer: Tokenizer) -> None:
        info = WorkerInfo(
            worker_id=self._worker_id,
            model=MODEL,
            num_blocks=1 << 20,
            max_num_seqs=1 << 14,
            max_num_batched_tokens=1 << 14,
            wire_version=WIRE_VERSION,
        )
        card = ModelCard(
            name=MODEL,
            revision="r",
            tokenizer_digest=tokenizer.digest,
            max_model_len=1 << 20,
            vocab_size=16,
        )
        bundle = tokenizer.to_bundle()
        call = calls.register(KEYS, info=info, card=card, tokenizer=bundle, lease_ms=LEASE_MS)
        run(self._client, call)


def _tokenizer() -> Tokenizer:
    vocab = {word: index for index, word in enumerate(("?", "a", "b", "c"))}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "?"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return Tokenizer(TokenizerFiles(raw.to_str(), chat_template=_TEMPLATE))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--pause-seconds", type=float, required=True)
    parser.add_argument("--batch", type=int, default=1 << 20, help="jobs that fall due together")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args(arguments)
    with connect(options.url) as client:
        mill = Mill(client)
        print("ready", flush=True)
        for _ in range(options.rounds):
            mill.serve(options.jobs, options.tokens, options.pause_seconds, options.batch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
