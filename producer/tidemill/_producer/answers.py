"""One job, its result waited for: a call for each kind of model."""

from collections.abc import Sequence
from typing import Unpack

from tidemill._checks import check_top_n
from tidemill._jobs import Jobs
from tidemill._large_audio import AudioShelf
from tidemill._request import JobOptions, JobSpec, Prompt
from tidemill._submitter import Submitter
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


class Answers:
    """The calls of a ``Producer`` that run a job and return what came of it."""

    _submitter: Submitter
    _jobs: Jobs
    _shelf: AudioShelf

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[JobOptions]
    ) -> Result:
        """Run one job and return its result; ``options`` are those of ``submit``.

        Waits for ``timeout`` seconds at most, then gives the job up and raises ``JobNotFinished``,
        as the four calls below do; so does whatever else cuts the waiting short, such as Ctrl-C.  A
        job with an idempotency key goes on all the same: the same call finds it again.
        """
        spec: JobOptions = {"stream": False, **options}
        return self._jobs.ask(JobSpec(prompt, **spec), timeout)

    def embed(
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
        return embeddings_of(self._jobs.ask(EmbedSpec(inputs, **options), timeout))

    def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        timeout: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Scores:
        """Return how well each document answers the query, by a cross-encoder or by embeddings."""
        return scores_of(self._jobs.ask(ScoreSpec(query, documents, **options), timeout))

    def rerank(
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
        scores = self.score(query, documents, timeout=timeout, **options)
        return ranked(documents, scores, top_n)

    def transcribe(
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
        card = self._submitter.card(options.get("model"))
        outlives = options.get("idempotency_key") is not None
        with self._shelf.holding_blocking(audio, card, outlives=outlives) as given:
            return transcription_of(self._jobs.ask(TranscribeSpec(given, **options), timeout))
