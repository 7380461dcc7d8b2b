"""What jobs for embeddings, scores and speech return, as types of their own."""

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.protocol.errors import MalformedMessage
from tidemill.protocol.messages import Usage
from tidemill.protocol.outcomes import Outcome, Segment
from tidemill.result import Result


@dataclass(frozen=True, slots=True)
class Embeddings:
    """One vector per input, in the order of the inputs.

    ``data`` holds them as little-endian float32, one after the other, for ``numpy.frombuffer``.
    """

    job_id: str
    vectors: tuple[tuple[float, ...], ...]
    data: bytes
    usage: Usage

    @property
    def size(self) -> int:
        """Components of one vector."""
        return len(self.vectors[0])

    @classmethod
    def of(cls, result: Result) -> "Embeddings":
        """Read the result of a ``EmbedSpec``, as from ``map``; raises ``MalformedMessage``."""
        return embeddings_of(result)


@dataclass(frozen=True, slots=True)
class Scores:
    """One score per document, in the order of the documents; more is better."""

    job_id: str
    scores: tuple[float, ...]
    usage: Usage

    @classmethod
    def of(cls, result: Result) -> "Scores":
        """Read the result of a ``ScoreSpec``, as from ``map``; raises ``MalformedMessage``."""
        return scores_of(result)


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document, its place in what was given, and how well it answers the query."""

    index: int
    document: str
    score: float


@dataclass(frozen=True, slots=True)
class Transcription:
    """What was said: the text, its language, and when each part of it was said, in seconds."""

    job_id: str
    text: str
    language: str
    seconds: float
    segments: tuple[Segment, ...]
    usage: Usage

    @classmethod
    def of(cls, result: Result) -> "Transcription":
        """Read the result of a ``TranscribeSpec``, as from ``map``; raises ``MalformedMessage``."""
        return transcription_of(result)


def embeddings_of(result: Result) -> Embeddings:
    """Read the result of an embed job; raises ``MalformedMessage`` if it is another's."""
    vectors = _outcome(result).vectors
    if vectors is None:
        raise _wrong(result, "vectors")
    return Embeddings(result.job_id, tuple(vectors.rows()), vectors.data, result.usage)


def scores_of(result: Result) -> Scores:
    """Read the result of a score job; raises ``MalformedMessage`` if it is another's."""
    scores = _outcome(result).scores
    if scores is None:
        raise _wrong(result, "scores")
    return Scores(result.job_id, scores, result.usage)


def transcription_of(result: Result) -> Transcription:
    """Read the result of a transcribe job; raises ``MalformedMessage`` if it is another's."""
    found = _outcome(result).transcript
    if found is None:
        raise _wrong(result, "transcript")
    return Transcription(
        result.job_id,
        result.text.strip(),
        found.language,
        found.seconds,
        found.segments,
        result.usage,
    )


def ranked(documents: Sequence[str], scores: Scores, top_n: int | None) -> list[Ranked]:
    """Return the best ``top_n`` documents, or all, the best first; equal ones in their order."""
    pairs = zip(documents, scores.scores, strict=True)
    found = [Ranked(index, document, score) for index, (document, score) in enumerate(pairs)]
    return sorted(found, key=lambda one: -one.score)[:top_n]


def _outcome(result: Result) -> Outcome:
    if result.outcome is None:
        raise _wrong(result, "outcome")
    return result.outcome


def _wrong(result: Result, what: str) -> MalformedMessage:
    return MalformedMessage(f"{result.job_id}: its result has no {what}; it is of another kind")
