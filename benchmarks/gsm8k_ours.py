"""The questions through a whole Tidemill: broker, scheduler and one worker of our own engine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gsm8k_compare import Output
from gsm8k_questions import STOP
from rich.progress import Progress

from tidemill import Job, Producer, Result, SamplingParams, TidemillError
from tidemill.cli.stack import Stack, StackOptions
from tidemill.cli.up import thread_environment

#: One answer takes seconds; a machine that needs this long for one will not finish.
_TIMEOUT_SECONDS = 600.0
#: Of 16 tokens: the shared prefix once, and 50 for each of 16 sequences.
_NUM_BLOCKS = 1024


@dataclass(frozen=True)
class Served:
    """All outputs, in the order of the prompts, and what they took."""

    outputs: tuple[Output, ...]
    prompt_lengths: tuple[int, ...]
    num_cached_tokens: int
    seconds: float


def serve(
    prompts: Sequence[str],
    model_dir: Path,
    directory: Path,
    progress: Progress,
    *,
    max_tokens: int,
    num_seqs: int,
    num_threads: int,
) -> Served:
    """Start a Tidemill below ``directory``, have it answer all prompts, and stop it."""
    options = StackOptions(
        redis_url=None,
        data_dir=directory,
        worker_args=(
            *("--model", str(model_dir), "--device", "cpu", "--dtype", "float32"),
            *("--max-num-seqs", str(num_seqs), "--max-model-len", "2048"),
            *("--num-gpu-blocks-override", str(_NUM_BLOCKS)),
        ),
        environment=thread_environment(1, num_threads),
    )
    task = progress.add_task("Tidemill", total=len(prompts))
    with (
        Stack(options, sink=lambda line: _echo(progress, line)) as stack,
        Producer(stack.url, timeout=60) as producer,
    ):
        started = time.monotonic()
        results: list[Result] = []
        for job in _submit(producer, prompts, max_tokens):
            results.append(job.result(timeout=_TIMEOUT_SECONDS))
            progress.advance(task)
        return _collect(results, time.monotonic() - started)


def _echo(progress: Progress, line: str) -> None:
    progress.console.print(line, style="dim", markup=False, soft_wrap=True)


def _submit(producer: Producer, prompts: Sequence[str], max_tokens: int) -> list[Job]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop=[STOP])
    jobs: list[Job] = []
    for job in producer.submit_many(prompts, params=params, priority=1, stream=False):
        if isinstance(job, TidemillError):
            raise job
        jobs.append(job)
    return jobs


def _collect(results: Sequence[Result], seconds: float) -> Served:
    return Served(
        outputs=tuple(Output(tuple(result.token_ids), result.text) for result in results),
        prompt_lengths=tuple(result.usage.prompt_tokens for result in results),
        num_cached_tokens=sum(result.usage.cached_tokens for result in results),
        seconds=seconds,
    )
