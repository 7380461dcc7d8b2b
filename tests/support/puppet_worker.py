"""A worker made of protocol calls alone: it does only what a test tells it."""

from dataclasses import dataclass

import redis

from tidemill.protocol import calls
from tidemill.protocol.calls import REF_FIELDS, JobRef
from tidemill.protocol.codec import WIRE_VERSION, encode
from tidemill.protocol.functions import run
from tidemill.protocol.ids import new_worker_id
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import (
    JobEnd,
    JobResult,
    ModelCard,
    TokenChunk,
    Usage,
    WorkerInfo,
    WorkerStatus,
)
from tidemill.protocol.prefix import DEFAULT_BLOCK_SIZE

TOKENIZER_DIGEST = "0" * 64


@dataclass(frozen=True)
class Claim:
    """A run command as the worker read it."""

    job_id: str
    fence: int


class PuppetWorker:
    """Registered from the start; ``model`` is its model's name."""

    def __init__(
        self,
        client: redis.Redis,
        *,
        model: str = "m",
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        num_blocks: int = 4096,
        lease_ms: int = 60_000,
        tokenizer_digest: str = TOKENIZER_DIGEST,
        bundle: bytes = b"no tokenizer",
    ) -> None:
        self.client = client
        self.keys = ShardKeys()
        self.lease_ms = lease_ms
        self.info = WorkerInfo(
            worker_id=new_worker_id(),
            model=model,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            wire_version=WIRE_VERSION,
        )
        self.card = ModelCard(
            name=model,
            revision="r1",
            tokenizer_digest=tokenizer_digest,
            max_model_len=512,
            vocab_size=50_000,
            block_size=DEFAULT_BLOCK_SIZE,
        )
        self.claims: list[Claim] = []
        self._cursor = "0-0"
        call = calls.register(
            self.keys, info=self.info, card=self.card, tokenizer=bundle, lease_ms=lease_ms
        )
        run(client, call)
        self.report()

    @property
    def worker_id(self) -> str:
        """Its id."""
        return self.info.worker_id

    @property
    def job_ids(self) -> list[str]:
        """The jobs it was told to run, in order."""
        return [claim.job_id for claim in self.claims]

    def beat(self) -> None:
        """Renew its registration and the leases of all it was told to run."""
        call = calls.beat(
            self.keys,
            worker_id=self.worker_id,
            model=self.info.model,
            tokenizer_digest=self.card.tokenizer_digest,
            lease_ms=self.lease_ms,
            jobs=[(claim.job_id, claim.fence) for claim in self.claims],
        )
        run(self.client, call)

    def read(self) -> list[Claim]:
        """Read its new run commands and say so, as a worker does before it begins to compute."""
        reply = self.client.xread({self.keys.commands(self.worker_id): self._cursor})
        claims = []
        for entry_id, fields in reply[0][1] if reply else []:
            self._cursor = entry_id.decode()
            if fields[b"k"] == b"run":
                claims.append(Claim(fields[b"j"].decode(), int(fields[b"f"])))
        self.claims += claims
        if claims:
            attempts = [(claim.job_id, claim.fence) for claim in claims]
            run(self.client, calls.claim(self.keys, worker_id=self.worker_id, jobs=attempts))
        return claims

    def report(self, **status: object) -> None:
        """Write a status that covers every command read; by default it is idle."""
        values = {"last_command": self._cursor, "free_blocks": self.info.num_blocks, **status}
        stream = self.keys.status(self.worker_id)
        self.client.xadd(stream, {"s": encode(WorkerStatus.model_validate(values))}, maxlen=1000)
        self.client.pexpire(stream, self.lease_ms)

    def append(self, claim: Claim, start: int, num: int) -> calls.Written:
        """Write ``num`` tokens whose ids are their positions."""
        chunk = TokenChunk(start=start, end=start + num, ids=tuple(range(start, start + num)))
        chunks = [(claim.job_id, claim.fence, chunk)]
        return run(self.client, calls.append(self.keys, worker_id=self.worker_id, chunks=chunks))[0]

    def finish(self, claim: Claim, num_tokens: int = 0) -> calls.Written:
        """End a job that holds ``num_tokens`` tokens."""
        end = JobEnd(state="done", finish_reason="stop", usage=Usage(completion_tokens=num_tokens))
        call = calls.finish(
            self.keys,
            JobRef.read(claim.job_id, self.client.hmget(self.keys.job(claim.job_id), REF_FIELDS)),
            fence=claim.fence,
            worker_id=self.worker_id,
            chunk=TokenChunk(start=num_tokens, end=num_tokens),
            result=JobResult(end=end, ids=tuple(range(num_tokens))),
        )
        return run(self.client, call)

    def work_off(self) -> list[Claim]:
        """Read commands, finish their jobs without a token, and report to be idle again."""
        claims = self.read()
        for claim in claims:
            assert self.finish(claim).accepted
        self.report()
        return claims
