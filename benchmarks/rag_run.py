"""One run of the RAG benchmark: a whole Tidemill of its own, all jobs at once, all results."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress, TaskID

from tidemill import Job, Producer, Result, SamplingParams, TidemillError
from tidemill.cli.stack import Stack, StackOptions
from tidemill.cli.up import echo, thread_environment

_PAGE = 256
_POLL_SECONDS = 0.5
_BLOCK_SIZE = 16
#: Tokens of a prompt and its answer, unless the whole KV cache holds fewer.
_MAX_MODEL_LEN = 2048
#: A machine on which nothing ends for so long will not finish.
_STALL_SECONDS = 120


@dataclass(frozen=True)
class Setup:
    """What all runs have in common; the model is served in float32, so that tokens are exact."""

    model_dir: Path
    num_workers: int
    num_threads: int | None
    kv_blocks: int
    max_tokens: int


@dataclass(frozen=True)
class Run:
    """What one run has measured; ``answers[i]`` are the tokens of job i."""

    order: str
    seconds: float
    prompt_tokens: int
    computed_tokens: int
    answers: tuple[tuple[int, ...], ...]

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that a prefix cache held."""
        return 1 - self.computed_tokens / self.prompt_tokens


def run_jobs(
    prompts: Sequence[Sequence[int]],
    setup: Setup,
    order: str,
    scheduler_args: Sequence[str],
    directory: Path,
    progress: Progress,
) -> Run:
    """Start a Tidemill below ``directory``, let it answer all prompts, and stop it.

    The clock runs from the first submission to the last end.
    """
    with (
        Stack(_options(setup, scheduler_args, directory), sink=echo) as stack,
        Producer(stack.url, timeout=60) as producer,
    ):
        task = progress.add_task(order, total=len(prompts))
        started = time.monotonic()
        jobs = _submit(producer, prompts, setup.max_tokens)
        _wait(producer, progress, task)
        seconds = time.monotonic() - started
        return _measure(order, seconds, [job.result(timeout=60) for job in jobs])


def _options(setup: Setup, scheduler_args: Sequence[str], directory: Path) -> StackOptions:
    max_tokens = min(_MAX_MODEL_LEN, setup.kv_blocks * _BLOCK_SIZE)
    return StackOptions(
        redis_url=None,
        data_dir=directory,
        num_workers=setup.num_workers,
        scheduler_args=tuple(scheduler_args),
        worker_args=(
            *("--model", str(setup.model_dir), "--device", "cpu", "--dtype", "float32"),
            *("--max-model-len", str(max_tokens)),
            *("--num-gpu-blocks-override", str(setup.kv_blocks)),
        ),
        environment=thread_environment(setup.num_workers, setup.num_threads),
    )


def _submit(producer: Producer, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Job]:
    # Answers of equal length: more tokens to compare, and the same work in every run.
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    jobs: list[Job] = []
    for start in range(0, len(prompts), _PAGE):
        page = prompts[start : start + _PAGE]
        for job in producer.submit_many(page, params=params, priority=1, batch="rag", stream=False):
            if isinstance(job, TidemillError):
                raise job
            jobs.append(job)
    return jobs


def _wait(producer: Producer, progress: Progress, task: TaskID) -> None:
    ended, since = 0, time.monotonic()
    while (status := producer.batch("rag").status()).unfinished:
        if status.total - status.unfinished > ended:
            ended, since = status.total - status.unfinished, time.monotonic()
        elif time.monotonic() - since > _STALL_SECONDS:
            raise SystemExit(f"no job has ended for {_STALL_SECONDS} s; {ended} had before")
        progress.update(task, completed=ended)
        time.sleep(_POLL_SECONDS)
    progress.update(task, completed=status.total)


def _measure(order: str, seconds: float, results: Sequence[Result]) -> Run:
    prompt_tokens = sum(result.usage.prompt_tokens for result in results)
    return Run(
        order=order,
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        computed_tokens=prompt_tokens - sum(result.usage.cached_tokens for result in results),
        answers=tuple(result.token_ids for result in results),
    )
