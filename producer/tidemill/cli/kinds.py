"""``tidemill embed``, ``score`` and ``transcribe``: jobs of other kinds from the terminal."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter

from tidemill._endpoint import find_endpoint
from tidemill._large_audio import AudioShelf
from tidemill.cli.connection import open_producer
from tidemill.cli.submit import RedisUrl, Tenant
from tidemill.job import Job
from tidemill.job_kinds import TranscribeOptions, TranscribeSpec
from tidemill.outcomes import Transcription, transcription_of
from tidemill.protocol.errors import ConfigError, TidemillError
from tidemill.protocol.outcomes import Segment

Model = Annotated[str | None, typer.Option(help="Served model. Default: the only one there is.")]
Priority = Annotated[int, typer.Option(help="Lower runs sooner; < 0 interactive, > 0 batch.")]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut what is too long for the model.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")]


class Timestamps(StrEnum):
    """What has its times told."""

    NONE = "none"
    SEGMENT = "segment"
    WORD = "word"


def embed(
    texts: Annotated[
        list[str] | None, typer.Argument(help="Texts; without any, each line of standard input.")
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(help="Keep so many components of each vector.")
    ] = None,
    normalize: Annotated[bool, typer.Option(help="Give each vector length 1.")] = True,
    truncate: Truncate = False,
    model: Model = None,
    priority: Priority = 0,
    tenant: Tenant = "default",
    redis_url: RedisUrl = None,
) -> None:
    """Print a vector for each text, as one line of JSON.

    `tidemill embed "high tide" "low tide"`, with a worker that serves such a model.
    """
    with open_producer(redis_url, tenant=tenant) as producer:
        answer = producer.embed(
            texts or _lines(),
            dimensions=dimensions,
            normalize=normalize,
            truncate=truncate,
            model=model,
            priority=priority,
        )
    for vector in answer.vectors:
        typer.echo(json.dumps([float(f"{number:.8g}") for number in vector]))


def score(
    query: Annotated[str, typer.Argument(help="What the documents are to answer.")],
    documents: Annotated[
        list[str] | None,
        typer.Argument(help="Documents; without any, each line of standard input."),
    ] = None,
    top_n: Annotated[int | None, typer.Option(min=1, help="Print the best so many.")] = None,
    truncate: Truncate = False,
    model: Model = None,
    priority: Priority = 0,
    tenant: Tenant = "default",
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Print how well each document answers the query, the best first.

    `tidemill score "When is high tide?" "At noon." "It is blue."`, with a worker of a model for
    embeddings or of a cross-encoder.
    """
    with open_producer(redis_url, tenant=tenant) as producer:
        found = producer.rerank(
            query,
            documents or _lines(),
            top_n=top_n,
            truncate=truncate,
            model=model,
            priority=priority,
        )
    if as_json:
        typer.echo(TypeAdapter(type(found)).dump_json(found).decode())
        return
    for one in found:
        typer.echo(f"{one.score:.6f}\t{one.document}")


def transcribe(
    file: Annotated[Path, typer.Argument(help="WAV, FLAC, MP3 or Ogg.")],
    language: Annotated[
        str | None, typer.Option(help="Code such as en. Default: the model finds out.")
    ] = None,
    translate: Annotated[
        bool, typer.Option("--translate", help="Write English, whatever is spoken.")
    ] = False,
    prompt: Annotated[
        str, typer.Option(help="Text that may have come before: settles names and style.")
    ] = "",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    timestamps: Annotated[Timestamps, typer.Option(help="What to tell the times of.")] = (
        Timestamps.NONE
    ),
    model: Model = None,
    priority: Priority = 0,
    tenant: Tenant = "default",
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Print what is said in a file, as it is understood.

    `tidemill transcribe talk.mp3 --timestamps segment`, with a worker of a model of speech.

    A file of more than 256 KiB goes through the blob store, from which the worker must read as
    well. Ctrl-C cancels the job.
    """
    options: TranscribeOptions = {
        "language": language,
        "task": "translate" if translate else "transcribe",
        "prompt": prompt,
        "temperature": temperature,
        "timestamps": timestamps.value,
        "live": timestamps is Timestamps.NONE and not as_json,
        "model": model,
        "priority": priority,
    }
    shelf = AudioShelf(find_endpoint(redis_url, tenant, None).url, tenant)
    with (
        open_producer(redis_url, tenant=tenant) as producer,
        shelf.holding_blocking(file, producer.model(model), outlives=False) as audio,
    ):
        [job] = producer.submit_many([TranscribeSpec(audio, **options)])
        if isinstance(job, TidemillError):
            raise job
        try:
            _show(job, timestamps, as_json=as_json)
        except KeyboardInterrupt:
            job.cancel()
            raise


def _show(job: Job, timestamps: Timestamps, *, as_json: bool) -> None:
    if timestamps is Timestamps.NONE and not as_json:
        _follow(job)
        return
    answer = transcription_of(job.result())
    if as_json:
        typer.echo(TypeAdapter(Transcription).dump_json(answer).decode())
        return
    for segment in answer.segments:
        _show_segment(segment)


def _follow(job: Job) -> None:
    is_first = True
    with job.stream() as stream:
        for chunk in stream:
            typer.echo(chunk.text.lstrip() if is_first else chunk.text, nl=False)
            is_first = is_first and not chunk.text.strip()
    typer.echo()


def _show_segment(segment: Segment) -> None:
    typer.echo(f"[{segment.start:7.2f} - {segment.end:7.2f}] {segment.text.strip()}")
    for word in segment.words:
        typer.echo(f"    {word.start:7.2f} - {word.end:7.2f}  {word.text.strip()}")


def _lines() -> list[str]:
    lines = [line for line in typer.get_text_stream("stdin").read().splitlines() if line.strip()]
    if not lines:
        raise ConfigError("there is no text", fix="Give some as arguments or on standard input.")
    return lines
