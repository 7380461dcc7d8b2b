"""The demo's work: submit, follow every stream, check that each is whole."""

import asyncio
import os
import signal
import time
from dataclasses import dataclass, field

from tidemill.async_client import AsyncProducer
from tidemill.cli.stack import Stack
from tidemill.protocol.errors import TidemillError
from tidemill.result import Result

SYSTEM = (
    "You are a helpful assistant at a small museum of technology. Visitors of every age ask you"
    " questions. Answer in plain language, be accurate, stay friendly, and keep your answer to a"
    " few short sentences. If you do not know something, say so instead of guessing."
)
QUESTIONS = (
    "What is the capital of France?",
    "Explain how a tide mill works.",
    "Write a haiku about the sea.",
    "Name three uses of a message queue.",
    "Translate 'good morning' into Spanish.",
    "What is 17 plus 25?",
    "Why is the sky blue?",
    "Give me a tip for learning to play the piano.",
    "Who wrote 'Romeo and Juliet'?",
    "Write one line of Python that sums the numbers from 1 to 100.",
    "What do bees do in winter?",
    "Suggest a name for a friendly robot.",
)


@dataclass(slots=True)
class Answer:
    """One prompt's stream as it grows; times are monotonic seconds."""

    question: str
    submitted: float = 0.0
    first_token: float | None = None
    finished: float | None = None
    text: str = ""
    ids: list[int] = field(default_factory=list)
    result: Result | None = None


class Killer:
    """Kills a worker with SIGKILL once a number of tokens has been streamed."""

    def __init__(self, stack: Stack, after_tokens: int = 60) -> None:
        self._stack = stack
        self._after_tokens = after_tokens
        self.killed_pid: int | None = None
        self.tokens_then = 0

    def check(self, num_tokens: int) -> None:
        """Kill once it is time."""
        pids = self._stack.pids("worker")
        if self.killed_pid is None and num_tokens >= self._after_tokens and pids:
            self.killed_pid, self.tokens_then = pids[0], num_tokens
            os.kill(pids[0], signal.SIGKILL)


class DemoRun:
    """All answers of a demo; ``problems`` names every broken promise."""

    def __init__(self, url: str, *, max_tokens: int, killer: Killer | None) -> None:
        self._url = url
        self._max_tokens = max_tokens
        self.killer = killer
        self.answers = [Answer(question) for question in QUESTIONS]
        self.problems: list[str] = []
        self.started = time.monotonic()

    @property
    def num_tokens(self) -> int:
        """Tokens streamed so far, all answers together."""
        return sum(len(answer.ids) for answer in self.answers)

    @property
    def seconds(self) -> float:
        """From the first submit to the last token."""
        ends = [answer.finished for answer in self.answers if answer.finished is not None]
        return (max(ends) if ends else time.monotonic()) - self.started

    async def run(self) -> None:
        """Submit every question at once and follow the streams side by side."""
        self.started = time.monotonic()
        async with AsyncProducer(self._url) as producer:
            await asyncio.gather(*(self._answer(producer, answer) for answer in self.answers))
        if self.killer is not None and self.killer.killed_pid is None:
            self.problems.append("the answers were over before a worker could be killed")

    async def _answer(self, producer: AsyncProducer, answer: Answer) -> None:
        answer.submitted = time.monotonic()
        try:
            await self._follow(producer, answer)
        except TidemillError as error:
            self.problems.append(f"{answer.question!r}: {error.one_line()}")
        answer.finished = time.monotonic()

    async def _follow(self, producer: AsyncProducer, answer: Answer) -> None:
        job = await producer.submit(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": answer.question}],
            max_tokens=self._max_tokens,
            temperature=0.0,
        )
        async for chunk in job.stream():
            if chunk.start != len(answer.ids):
                self.problems.append(
                    f"{answer.question!r}: got token {chunk.start} after {len(answer.ids)}"
                )
            answer.first_token = answer.first_token or time.monotonic()
            answer.ids += chunk.ids
            answer.text += chunk.text
            if self.killer is not None:
                self.killer.check(self.num_tokens)
        answer.result = await job.result()
        self._compare(answer, answer.result)

    def _compare(self, answer: Answer, result: Result) -> None:
        if tuple(answer.ids) != result.token_ids or answer.text != result.text:
            self.problems.append(f"{answer.question!r}: the stream differs from the result")
