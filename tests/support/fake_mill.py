"""A scheduler and a worker made of protocol calls: they do to a job only what a test says."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import redis
import tokenizers

from support.shard import CANCELLED, expire_lease, lead, reap
from support.wait import wait_until
from tidemill.protocol import calls
from tidemill.protocol.calls import REF_FIELDS, JobRef
from tidemill.protocol.codec import WIRE_VERSION, decode, encode
from tidemill.protocol.functions import run
from tidemill.protocol.ids import new_worker_id
from tidemill.protocol.keys import CONSUMER, GROUP, ShardKeys
from tidemill.protocol.messages import (
    GenerateRequest,
    JobEnd,
    JobResult,
    ModelCard,
    TokenChunk,
    Usage,
    WorkerInfo,
    WorkerStatus,
)
from tidemill.service.tokenizer import Tokenizer
from tidemill.service.tokenizer_files import TokenizerFiles

KEYS = ShardKeys()

_LEASE_MS = 60_000


CHAT_TEMPLATE = """{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}
{%- if add_generation_prompt %}assistant{% endif %}"""


def make_tokenizer(*words: str) -> Tokenizer:
    """A tokenizer that gives each word its place in ``words``, counted from 1, and others 0."""
    vocab = {word: index for index, word in enumerate(("?", *words))}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "?"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return Tokenizer(TokenizerFiles(raw.to_str(), chat_template=CHAT_TEMPLATE))


def text_of(position: int) -> str:
    """The text of the token at a position; ids are positions themselves."""
    return f"w{position} "


@dataclass
class Attempt:
    """One claim of one job, and what was written under it and before."""

    client: redis.Redis
    job_id: str
    fence: int
    worker_id: str
    request: GenerateRequest
    idempotency_key: str = ""
    batch: str = ""
    entries: list[tuple[int, int]] = field(default_factory=list)
    text: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return self.entries[-1][0] if self.entries else 0

    def say(self, num_tokens: int = 1) -> TokenChunk:
        """Append the next tokens as one entry."""
        chunk = self._next(num_tokens)
        chunks = [(self.job_id, self.fence, chunk)]
        written = run(self.client, calls.append(KEYS, worker_id=self.worker_id, chunks=chunks))
        assert written[0].accepted, written
        return chunk

    def finish(
        self, num_tokens: int = 0, *, tail: str = "", state: str = "done", error: str | None = None
    ) -> calls.Written:
        """End the job with some last tokens and a text that was held back."""
        chunk = self._next(num_tokens, tail)
        usage = Usage(prompt_tokens=3, completion_tokens=chunk.end)
        end = JobEnd(state=state, finish_reason="stop", usage=usage, error=error)
        result = JobResult(
            end=end, ids=tuple(range(chunk.end)), text=self.text, entries=tuple(self.entries)
        )
        call = calls.finish(
            KEYS,
            JobRef(self.job_id, calls.queue_name(self.request), self.idempotency_key, self.batch),
            fence=self.fence,
            worker_id=self.worker_id,
            chunk=chunk,
            result=result,
        )
        return run(self.client, call)

    def crash(self) -> None:
        """Let the lease run out and the job go back to its queue."""
        expire_lease(self.client, self.job_id)
        assert reap(self.client, self.job_id) == 1

    def _next(self, num_tokens: int, tail: str = "") -> TokenChunk:
        start = self.num_tokens
        ids = tuple(range(start, start + num_tokens))
        text = "".join(map(text_of, ids)) + tail
        if num_tokens or tail:
            self.entries.append((start + num_tokens, len(text)))
            self.text += text
        return TokenChunk(start=start, end=start + num_tokens, ids=ids, text=text)


class FakeMill:
    """Leads the shard and serves one model; needs a client of its own per thread."""

    def __init__(
        self, client: redis.Redis, *, model: str = "m", tokenizer: Tokenizer | None = None
    ) -> None:
        self.client = client
        tokenizer = tokenizer or make_tokenizer("a", "b", "c")
        self.worker_id = new_worker_id()
        self.card = ModelCard(
            name=model,
            revision="r1",
            tokenizer_digest=tokenizer.digest,
            max_model_len=512,
            vocab_size=50_000,
        )
        self._bundle = tokenizer.to_bundle()
        self._register(self._bundle)
        self._epoch = lead(client)

    def advertise(self, **fields: object) -> None:
        """Register again, with these fields of the model's card changed."""
        self.card = self.card.model_copy(update=fields)
        self._register(self._bundle)

    def claim(self, timeout: float = 10.0) -> Attempt:
        """Dispatch the next waiting job to the worker."""
        return wait_until(self._claim, timeout, "a job on some queue")

    def reclaim(self, earlier: Attempt) -> Attempt:
        """Dispatch a job that crashed again, and go on where its log ends."""
        attempt = self.claim()
        assert attempt.job_id == earlier.job_id
        attempt.entries, attempt.text = list(earlier.entries), earlier.text
        return attempt

    def serve(self, work: Callable[[Attempt], object], until: threading.Event) -> None:
        """Claim jobs and work on them until told to stop."""
        while not until.is_set():
            attempt = self._claim()
            if attempt is not None:
                work(attempt)
            else:
                until.wait(0.005)

    def end_all(self) -> None:
        """Cancel every job that has not ended."""
        for key in self.client.scan_iter(match=KEYS.job("*")):
            job_id = key.decode().removeprefix(KEYS.job(""))
            worker_id, *reference = self.client.hmget(key, "w", *REF_FIELDS)
            ref = JobRef.read(job_id, reference)
            run(self.client, calls.cancel(KEYS, ref, worker_id=worker_id.decode(), end=CANCELLED))

    def report(self, **status: object) -> None:
        """Write a worker status."""
        stream = KEYS.status(self.worker_id)
        self.client.xadd(stream, {"s": encode(WorkerStatus.model_validate(status))})
        self.client.pexpire(stream, _LEASE_MS)

    def _register(self, bundle: bytes) -> None:
        info = WorkerInfo(
            worker_id=self.worker_id,
            model=self.card.name,
            num_blocks=100,
            max_num_seqs=8,
            max_num_batched_tokens=2048,
            wire_version=WIRE_VERSION,
        )
        call = calls.register(KEYS, info=info, card=self.card, tokenizer=bundle, lease_ms=_LEASE_MS)
        run(self.client, call)

    def _claim(self) -> Attempt | None:
        for queue in self.client.zrange(KEYS.active_queues, 0, -1):
            name = queue.decode()
            reply = self.client.xreadgroup(GROUP, CONSUMER, {KEYS.ingress(name): ">"}, count=1)
            for entry_id, fields in reply[0][1] if reply else []:
                return self._dispatch(name, entry_id.decode(), fields[b"j"].decode())
        return None

    def _dispatch(self, queue: str, entry_id: str, job_id: str) -> Attempt | None:
        request, *names = self.client.hmget(KEYS.job(job_id), "req", "ik", "bid")
        call = calls.dispatch(
            KEYS,
            job_id=job_id,
            queue=queue,
            entry_id=entry_id,
            worker_id=self.worker_id,
            epoch=self._epoch,
            lease_ms=_LEASE_MS,
        )
        fence = run(self.client, call).fence
        if not fence or request is None:
            return None
        decoded = decode(request, GenerateRequest)
        worker_id = self.worker_id
        named = [(name or b"").decode() for name in names]
        return Attempt(self.client, job_id, fence, worker_id, decoded, *named)


def generate(sizes: Sequence[int]) -> Callable[[Attempt], object]:
    """Work that says as many tokens per entry as ``sizes`` tells, then finishes."""

    def work(attempt: Attempt) -> None:
        for size in sizes:
            attempt.say(size)
        attempt.finish()

    return work
