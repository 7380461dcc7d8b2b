"""A producer process that submits jobs under keys, follows them live and records what it saw."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.fake_engine import generate
from tidemill import AsyncProducer, JobSpec
from tidemill.protocol.errors import BrokerUnavailable, JobCancelled, JobFailed, UnknownModel

MODEL = "m"

_RETRY_SECONDS = 0.05


@dataclass(frozen=True)
class PlannedJob:
    """One job: what is asked for, under which key, and how it must end."""

    key: str
    prompt: tuple[int, ...]
    num_tokens: int = 20
    options: dict[str, Any] = field(default_factory=dict)
    state: str = "done"

    @property
    def oracle(self) -> list[int]:
        """The tokens that the fake model must generate."""
        return generate(self.prompt, self.num_tokens)

    @property
    def raw_body(self) -> str:
        """How the front door takes it, under no key but its entry's."""
        params = {"max_tokens": self.num_tokens, "temperature": 0, "ignore_eos": True}
        request = {"model": MODEL, "prompt_ids": self.prompt, "params": params}
        return json.dumps({"request": request})

    @property
    def spec(self) -> JobSpec:
        """How the SDK takes it."""
        return JobSpec(
            list(self.prompt),
            model=MODEL,
            max_tokens=self.num_tokens,
            temperature=0,
            ignore_eos=True,
            idempotency_key=self.key,
            **self.options,
        )


def plan_jobs(num: int, **fields: Any) -> list[PlannedJob]:
    """Jobs with prompts of their own."""
    return [
        PlannedJob(f"key-{index}", (index + 1, index + 2, 100 + index), **fields)
        for index in range(num)
    ]


@dataclass
class Record:
    """What one life of a producer has seen, as its file tells."""

    #: Key -> (job id, whether this life created it).
    accepted: dict[str, tuple[str, bool]] = field(default_factory=dict)
    #: Job id -> (start, ids) of the chunks in the order in which they came.
    chunks: dict[str, list[tuple[int, list[int]]]] = field(default_factory=dict)
    #: Job id -> state that its reader was told at the end.
    ends: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> "Record":
        """Read a file; a killed writer may have left half a line at its end."""
        record = cls()
        for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
            if line.endswith("\n"):
                record._take(json.loads(line))
        return record

    def _take(self, event: dict[str, Any]) -> None:
        if event["kind"] == "accepted":
            self.accepted[event["key"]] = (event["job"], event["is_new"])
        elif event["kind"] == "chunk":
            self.chunks.setdefault(event["job"], []).append((event["start"], event["ids"]))
        else:
            self.ends[event["job"]] = event["state"]


class Recorder:
    """Submits, follows and writes one line per event."""

    def __init__(self, producer: AsyncProducer, path: Path) -> None:
        self._producer = producer
        self._file = path.open("a")

    async def run(self, jobs: Sequence[PlannedJob]) -> None:
        """Return when every job has ended for its reader."""
        handles = await self._submit([job.spec for job in jobs])
        for job, handle in zip(jobs, handles, strict=True):
            self._write(kind="accepted", key=job.key, job=handle.id, is_new=handle.is_new)
        await asyncio.gather(*(self._follow(handle) for handle in handles))

    async def _submit(self, specs: list[JobSpec]) -> list[Any]:
        while True:
            handles = await self._submit_once(specs)
            if handles:
                return handles
            await asyncio.sleep(_RETRY_SECONDS)

    async def _submit_once(self, specs: list[JobSpec]) -> list[Any]:
        """Submit; nothing if the broker is away or no worker has announced the model yet."""
        try:
            handles = await self._producer.submit_many(specs)
        except BrokerUnavailable:
            return []
        for handle in handles:
            if isinstance(handle, UnknownModel):
                return []
            if isinstance(handle, Exception):
                raise handle
        return list(handles)

    async def _follow(self, handle: Any) -> None:
        state = "done"
        try:
            async for chunk in handle.stream():
                self._write(kind="chunk", job=handle.id, start=chunk.start, ids=chunk.ids)
        except JobFailed as error:
            state = error.state
        except JobCancelled:
            state = "cancelled"
        self._write(kind="end", job=handle.id, state=state)

    def _write(self, **event: Any) -> None:
        self._file.write(json.dumps(event | {"at": time.monotonic()}) + "\n")
        self._file.flush()


def main(url: str, path: str, jobs: Sequence[PlannedJob]) -> int:
    """Run one life of a producer."""

    async def run() -> None:
        async with AsyncProducer(url, timeout=30.0) as producer:
            await Recorder(producer, Path(path)).run(jobs)

    asyncio.run(run())
    return 0
