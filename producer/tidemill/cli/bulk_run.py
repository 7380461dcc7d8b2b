"""One bulk run: submits the lines that are not done, writes what comes back, shows progress."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tidemill._request import JobOptions, JobSpec
from tidemill.cli.bulk_input import InputLine, LineKey, LineReader
from tidemill.cli.bulk_output import OutputFile
from tidemill.client import Producer
from tidemill.protocol.errors import BrokerError, JobError, TidemillError
from tidemill.result import Result


@dataclass(slots=True)
class Tally:
    """Sums over the lines finished by this run."""

    started: float = field(default_factory=time.monotonic)
    num_done: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, result: Result) -> None:
        """Count one answer."""
        self.num_done += 1
        self.prompt_tokens += result.usage.prompt_tokens
        self.cached_tokens += result.usage.cached_tokens
        self.completion_tokens += result.usage.completion_tokens

    @property
    def seconds(self) -> float:
        """Time since the run began."""
        return time.monotonic() - self.started

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second."""
        return self.completion_tokens / max(self.seconds, 1e-9)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that the prefix cache held."""
        return self.cached_tokens / max(1, self.prompt_tokens)


class BulkRun:
    """One pass over the input: submits what is not done, writes what comes back."""

    def __init__(
        self,
        producer: Producer,
        reader: LineReader,
        output: OutputFile,
        total: int,
        max_in_flight: int,
    ) -> None:
        self._producer = producer
        self._reader = reader
        self._output = output
        self._total = total
        self._max_in_flight = max_in_flight
        self.tally = Tally()

    def run(self, input_path: Path) -> None:
        """Process the file; raises ``BrokerError`` if the broker stays away."""
        pending: deque[InputLine] = deque()
        with _progress() as progress:
            self._bar = progress
            self._task = progress.add_task("bulk", total=self._total, rate=0.0, hits=0.0, failed=0)
            results = self._producer.map(
                self._specs(input_path, pending),
                max_in_flight=self._max_in_flight,
                ordered=True,
                return_exceptions=True,
            )
            for outcome in results:
                if isinstance(outcome, BrokerError):
                    raise outcome
                self._finish(pending.popleft(), outcome)
                self._show()
            self._show()

    def report(self, console: Console) -> None:
        """Print the sums."""
        tally = self.tally
        console.print(
            f"{tally.num_done} answered, {tally.num_failed} failed,"
            f" {tally.num_skipped} done before, in {tally.seconds:.1f} s:"
            f" {tally.completion_tokens:,} tokens at {tally.tokens_per_second:.0f} tokens/s,"
            f" prefix hit rate {tally.hit_rate:.1%}"
            f" ({tally.cached_tokens:,} of {tally.prompt_tokens:,} prompt tokens)"
        )

    def _specs(self, input_path: Path, pending: deque[InputLine]) -> Iterator[JobSpec]:
        for count, line in enumerate(self._reader.read(input_path)):
            if count >= self._total:
                return
            if line.key in self._output.done:
                self.tally.num_skipped += 1
            elif line.spec is None:
                self._fail(line, line.error or "", "")
            else:
                pending.append(line)
                yield self._retry(line.key, line.spec)

    def _retry(self, key: LineKey, spec: JobSpec) -> JobSpec:
        failed_job = self._output.retries.get(key, "")
        if failed_job:
            # The old key would only return the failed job again.
            new_key = f"{spec.options['idempotency_key']}-{failed_job}"
            options: JobOptions = {**spec.options, "idempotency_key": new_key}
            return JobSpec(spec.prompt, **options)
        return spec

    def _finish(self, line: InputLine, outcome: Result | TidemillError) -> None:
        if isinstance(outcome, TidemillError):
            job_id = outcome.job_id if isinstance(outcome, JobError) else ""
            self._fail(line, outcome.one_line(), job_id)
            return
        self.tally.add(outcome)
        self._write(
            line,
            outcome.job_id,
            text=outcome.text,
            finish_reason=outcome.finish_reason,
            usage=outcome.usage.model_dump(),
            error=None,
            **_told_logprobs(outcome),
            **_several(outcome),
        )

    def _fail(self, line: InputLine, reason: str, job_id: str) -> None:
        self.tally.num_failed += 1
        self._write(line, job_id, error=reason)

    def _write(self, line: InputLine, job_id: str, **fields: Any) -> None:
        self._output.write(
            {"custom_id": line.custom_id, "line": line.number, "job_id": job_id, **fields}
        )

    def _show(self) -> None:
        tally = self.tally
        self._bar.update(
            self._task,
            completed=tally.num_done + tally.num_failed + tally.num_skipped,
            rate=tally.tokens_per_second,
            hits=100 * tally.hit_rate,
            failed=tally.num_failed,
        )


def _told_logprobs(result: Result) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if result.logprobs is not None:
        told["token_ids"] = result.token_ids
        told["logprobs"] = [each.model_dump() for each in result.logprobs]
    if result.prompt_logprobs is not None:
        told["prompt_ids"] = result.prompt_ids
        told["prompt_logprobs"] = [each and each.model_dump() for each in result.prompt_logprobs]
    return told


def _progress() -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tok/s"),
        TextColumn("hits {task.fields[hits]:.0f} %"),
        TextColumn("failed {task.fields[failed]}"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def _several(result: Result) -> dict[str, Any]:
    if not result.several:
        return {}
    return {
        "choices": [
            {
                "index": choice.index,
                "text": choice.text,
                "finish_reason": choice.finish_reason,
                **({} if choice.score is None else {"score": choice.score}),
            }
            for choice in result.several
        ]
    }
