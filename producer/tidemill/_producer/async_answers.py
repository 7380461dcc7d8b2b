"""The asynchronous twin of ``tidemill._producer.answers``."""

from collections.abc import Sequence
from typing import Unpack

from tidemill._async_jobs import AsyncJobs
from tidemill._async_submitter import AsyncSubmitter
from tidemill._checks import check_top_n
from tidemill._large_audio import AudioShelf
from tidemill._request import JobOptions, JobSpec, Prompt
from tidemill.job_kinds import (
    Audio,
    EmbedOptions,
    EmbedSpec,
    Inputs,
    ScoreOptions,
    ScoreSpec,
    TranscribeOptions,
    TranscribeSpec,
)
from tidemill.outcomes import (
    Embeddings,
    Ranked,
    Scores,
    Transcription,
    embeddings_of,
    ranked,
    scores_of,
    transcription_of,
)
from tidemill.result import Result


class AsyncAnswers:
    """The calls of an ``AsyncProducer`` that run a job; see ``Answers``."""

    _submitter: AsyncSubmitter
    _jobs: AsyncJobs
    _shelf: AudioShelf

    async def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[JobOptions]
    ) -> Result:
        """Run one job and return its result; ``options`` are those of ``submit``.

        Waits for ``timeout`` seconds at most, then gives the job up and raises ``JobNotFinished``,
        as the four calls below do; so does whatever else cuts the waiting short, such as Ctrl-C.  A
        job with an idempotency key goes on all the same: the same call finds it again.
        """
        spec: JobOptions = {"stream": False, **options}
        return await self._jobs.ask(JobSpec(prompt, **spec), timeout)

    async def embed(
        self,
        inputs: str | Sequence[int] | Inputs,
        *,
        timeout: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Embeddings:
        """Return a vector for a text, for the token ids of one, or for each of a list of either.

        Waits for ``timeout`` seconds at most, as ``generate`` does.  For many lists at once give
        ``EmbedSpec(...)`` to ``map``.
        """
        return embeddings_of(await self._jobs.ask(EmbedSpec(inputs, **options), timeout))

    async def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        timeout: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Scores:
        """Return how well each document answers the query, by a cross-encoder or by embeddings."""
        return scores_of(await self._jobs.ask(ScoreSpec(query, documents, **options), timeout))

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        timeout: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> list[Ranked]:
        """Return the documents, the best first, or the best ``top_n`` of them, 1 or more."""
        check_top_n(top_n)
        scores = await self.score(query, documents, timeout=timeout, **options)
        return ranked(documents, scores, top_n)

    async def transcribe(
        self,
        audio: Audio,
        *,
        timeout: float | None = None,
        **options: Unpack[TranscribeOptions],
    ) -> Transcription:
        """Return what is said in a file of audio, given as its content or its path.

        One of more than 256 KiB, and 25 MiB at most, goes through the blob store.  To follow what
        is written, submit a ``TranscribeSpec`` and stream the job.
        """
        options.setdefault("live", False)
        card = await self._submitter.card(options.get("model"))
        outlives = options.get("idempotency_key") is not None
        async with self._shelf.holding(audio, card, outlives=outlives) as given:
            return transcription_of(await self._jobs.ask(TranscribeSpec(given, **options), timeout))
