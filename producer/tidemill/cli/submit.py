"""``tidemill submit`` and ``follow``: one job from the terminal."""

import sys
import time
from datetime import datetime
from typing import Annotated

import typer
from pydantic import TypeAdapter
from rich.console import Console

from tidemill.cli.connection import open_producer
from tidemill.cli.job_options import (
    Batch,
    CallbackUrl,
    Deadline,
    Lora,
    MaxQueue,
    MaxRetries,
    Metadata,
    PrefixId,
    StallTimeout,
    parse_metadata,
)
from tidemill.cli.sampling_options import (
    BadWord,
    BeamSearch,
    BestOf,
    FrequencyPenalty,
    LogitBias,
    Logprobs,
    NumAnswers,
    PresencePenalty,
    PromptLogprobs,
    RepetitionPenalty,
    parse_bias,
    said,
)
from tidemill.cli.structured_options import (
    Choice,
    Grammar,
    JsonSchema,
    Regex,
    structured_fields,
)
from tidemill.job import Job
from tidemill.protocol.errors import ConfigError, JobCancelled, JobFailed
from tidemill.service.diagnosis.finding import duration

RedisUrl = Annotated[
    str | None,
    typer.Option(
        envvar="TIDEMILL_REDIS_URL",
        help="Address of the broker. Default: the one that `tidemill up` started here.",
    ),
]

Tenant = Annotated[str, typer.Option(help="On whose behalf.")]

Shard = Annotated[
    str | None,
    typer.Option(help="Two hex digits. Default: TIDEMILL_SHARD, or that of the tenant `default`."),
]


def submit(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    model: Annotated[
        str | None, typer.Option(help="Served model. Default: the only one there is.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message to go first.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the text as it is, without a chat template.")
    ] = False,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to generate. Default: the model's context.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy. Default, as of the next: the model's.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling; 1 is off.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from so many tokens; 0 is off.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Least probability relative to the best token's; 0 is off.")
    ] = None,
    n: NumAnswers = 1,
    best_of: BestOf = None,
    beam_search: BeamSearch = False,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    repetition_penalty: RepetitionPenalty = None,
    logit_bias: LogitBias = None,
    bad_word: BadWord = None,
    logprobs: Logprobs = None,
    prompt_logprobs: PromptLogprobs = None,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same output. Default: one of the job's own.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text; repeatable.")] = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    choice: Choice = None,
    grammar: Grammar = None,
    priority: Annotated[
        int, typer.Option(help="Lower runs sooner; < 0 interactive, > 0 batch.")
    ] = 0,
    tenant: Tenant = "default",
    idempotency_key: Annotated[
        str | None, typer.Option(help="The same key always gets the same job.")
    ] = None,
    delay: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Do not run it before.")
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Do not run it before; like 2030-01-31T08:00+01:00."),
    ] = None,
    deadline: Deadline = None,
    max_queue: MaxQueue = None,
    stall_timeout: StallTimeout = None,
    max_retries: MaxRetries = None,
    batch: Batch = None,
    callback_url: CallbackUrl = None,
    metadata: Metadata = None,
    prefix_id: PrefixId = None,
    lora: Lora = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Print the job's id and leave; see `tidemill follow`.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole result as JSON.")
    ] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Queue one prompt and print the answer as it comes.

    `tidemill submit "Why is the sky blue?" --max-tokens 60`; `--json` tells all there is of it,
    `--detach` prints its id and leaves.

    Ctrl-C cancels the job.
    """
    text = _read_stdin() if prompt == "-" else prompt
    with open_producer(redis_url, tenant=tenant) as producer:
        job = producer.submit(
            text if raw else _conversation(system, text),
            model=model,
            priority=priority,
            idempotency_key=idempotency_key,
            stream=not (as_json or detach),
            max_tokens=max_tokens,
            **said(
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                repetition_penalty=repetition_penalty,
            ),
            n=n,
            best_of=best_of,
            use_beam_search=beam_search,
            logit_bias=parse_bias(logit_bias),
            bad_words=bad_word or (),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            stop=stop or (),
            structured=structured_fields(json_schema, regex, choice, grammar),
            seed=seed,
            delay=delay,
            at=_time(at),
            deadline=deadline,
            max_queue=max_queue,
            stall_timeout=stall_timeout,
            max_retries=max_retries,
            batch=batch,
            callback_url=callback_url,
            metadata=parse_metadata(metadata),
            prefix_id=prefix_id,
            lora=lora,
        )
        _tell_wait(job, is_detached=detach)
        if detach:
            typer.echo(job.id)
            return
        try:
            _show(job, as_json=as_json)
        except KeyboardInterrupt:
            job.cancel()
            raise


def follow(
    job_id: Annotated[str, typer.Argument(help="What `tidemill submit --detach` printed.")],
    after: Annotated[int, typer.Option(min=0, help="Skip the first so many tokens.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole result as JSON.")
    ] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Print a job's output from the start, or from a position, until it ends.

    `tidemill follow $(tidemill submit "Why is the sky blue?" --detach)`; Ctrl-C leaves it alone.
    """
    with open_producer(redis_url) as producer:
        _show(producer.job(job_id), after=after, as_json=as_json)


def _tell_wait(job: Job, *, is_detached: bool) -> None:
    """Warn of a deadline that is likely to pass; tell who leaves for how long the job waits."""
    if job.estimated_wait is None:
        return
    wait = f"a wait of about {duration(1000 * job.estimated_wait)} is likely"
    if job.deadline_at_risk:
        typer.echo(f"warning: {wait}, longer than the deadline; the job is queued", err=True)
    elif is_detached:
        typer.echo(wait, err=True)


def _conversation(system: str | None, text: str) -> list[dict[str, str]]:
    if not text.strip():
        raise ConfigError("prompt: it is empty", fix="Give some text.")
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": text}]


def _time(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        given = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            f"at: {text[:40]!r} is not a time", fix="Write it like 2030-01-31T08:00."
        ) from error
    try:
        # Without a time zone it is the clock on the wall here.
        return given.astimezone()
    except (OverflowError, ValueError) as error:
        raise ConfigError(
            f"at: {text[:40]!r} is out of range", fix="Give a time before the year 2256."
        ) from error


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"prompt: standard input is not UTF-8 (byte {error.start})",
            fix="Convert it, for example with iconv.",
        ) from error


def _show(job: Job, *, after: int = 0, as_json: bool) -> None:
    if as_json:
        _show_json(job)
    else:
        _show_text(job, after)


def _show_json(job: Job) -> None:
    try:
        result = job.result()
    except (JobFailed, JobCancelled) as error:
        # What the job produced before it ended is a result too; the exit status tells them apart.
        if error.result is not None:
            typer.echo(_as_json(error.result))
        raise
    typer.echo(_as_json(result))


def _as_json(result: object) -> str:
    return TypeAdapter(type(result)).dump_json(result).decode()


def _show_text(job: Job, after: int) -> None:
    started = time.monotonic()
    num_tokens, first = 0, None
    others: dict[int, str] = {}
    with job.stream(after=after) as stream:
        try:
            for chunk in stream:
                first = first if first is not None else time.monotonic() - started
                num_tokens += chunk.end - chunk.start
                if chunk.choice:
                    # Side by side they could not be read.
                    others[chunk.choice] = others.get(chunk.choice, "") + chunk.text
                else:
                    typer.echo(chunk.text, nl=False)
        finally:
            typer.echo()
            for choice, text in sorted(others.items()):
                typer.echo(f"\n[{choice + 1}] {text}")
    if sys.stderr.isatty():
        elapsed = time.monotonic() - started
        Console(stderr=True, highlight=False).print(
            f"[dim]{num_tokens} tokens, first after {first or elapsed:.2f} s,"
            f" {num_tokens / max(elapsed, 1e-9):.0f} tokens/s[/]"
        )
