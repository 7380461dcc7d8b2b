"""A job runner over noise that compiles grammars, and what it tells of its jobs."""

import threading
import time
from collections.abc import Callable
from typing import Any, cast

from llguidance import LLMatcher

from support.guided_engine import noisy_engine
from support.tiny_tokenizers import byte_level_tokenizer
from tidemill.protocol.calls import JobRef
from tidemill.protocol.messages import GenerateRequest
from tidemill.protocol.prefix import salt_keys
from tidemill.protocol.sampling import SamplingParams
from tidemill.protocol.structured import StructuredOutput
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.generated import Generated
from tidemill_gpuworker.shell.claims import Claim
from tidemill_gpuworker.shell.job_runner import JobRunner
from tidemill_gpuworker.shell.jobs import Job
from tidemill_gpuworker.shell.outbox import Update
from tidemill_gpuworker.shell.publisher import Publisher
from tidemill_gpuworker.structured_output.compiler import GrammarCompiler
from tidemill_gpuworker.structured_output.desk import GrammarDesk
from tidemill_gpuworker.structured_output.vocabulary import vocabulary_of

TOKENIZER = byte_level_tokenizer()
VOCAB_SIZE = TOKENIZER.vocab_size
_vocabulary = vocabulary_of(TOKENIZER, VOCAB_SIZE)
assert _vocabulary is not None
VOCABULARY = _vocabulary


class Record:
    """The publisher's part: remembers what it was told of each job."""

    def __init__(self) -> None:
        self.updates: dict[str, list[Update]] = {}

    def open(self, job: Job, written: object) -> None:
        self.updates.setdefault(job.job_id, [])

    def num_tokens(self, job: Job | str) -> int:
        job_id = job if isinstance(job, str) else job.job_id
        return sum(len(update.ids) for update in self.updates[job_id])

    def generated(self, job: Job, choice: int = 0) -> Generated:
        told = self.updates[job.job_id]
        ids = [token_id for update in told for token_id in update.ids]
        return Generated(ids, sum(len(update.text) for update in told))

    def publish(self, updates: list[Update]) -> None:
        for update in updates:
            self.updates[update.job_id].append(update)

    def text(self, job_id: str) -> str:
        return "".join(update.text for update in self.updates[job_id])

    def end(self, job_id: str) -> Any:
        return next((u.end for u in self.updates[job_id] if u.end is not None), None)


class GrammarStage:
    """A job runner whose grammars come from ``build``."""

    def __init__(
        self,
        build: Callable[[StructuredOutput], LLMatcher],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.compiler = GrammarCompiler(VOCABULARY, build=build, clock=clock, limit_seconds=10)
        self.woken = threading.Event()
        self.engine: Engine = noisy_engine(TOKENIZER, VOCAB_SIZE)
        self.record = Record()
        self.runner = JobRunner(
            self.engine,
            cast(Publisher, self.record),
            lambda job, reason: None,
            grammars=GrammarDesk(self.compiler, wake=self.woken.set),
        )

    def admit(self, job_id: str, regex: str | None = None, num_tokens: int = 30) -> Claim:
        structured = None if regex is None else StructuredOutput(regex=regex)
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=regex is None)
        request = GenerateRequest(
            model="m", prompt_ids=(1, 2, 3), params=params, structured=structured
        )
        job = Job(JobRef(job_id, "q"), 1)
        claim = Claim(job, request, (1, 2, 3), 0, salt_keys(b"salt", None))
        self.runner.admit(claim)
        return claim

    def run_until(self, holds: Callable[[], bool]) -> None:
        for _ in range(300):
            if holds():
                return
            assert self.runner.can_step
            self.runner.step()
        raise AssertionError("it never holds")
