"""Fewer, larger events: holds the tokens of a stream until there are enough of them."""

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field, replace

from tidemill._follow import Chunk
from tidemill.gateway.jobs import Piece
from tidemill.protocol.errors import TidemillError


def paced(
    batches: AsyncGenerator[list[Piece]], stream_interval: int
) -> AsyncGenerator[list[Piece]]:
    """Yield pieces of ``stream_interval`` tokens at least, but for each choice's first and last.

    What is held when an error ends the stream comes before it.
    """
    return batches if stream_interval == 1 else _held(batches, stream_interval)


async def _held(
    batches: AsyncGenerator[list[Piece]], stream_interval: int
) -> AsyncGenerator[list[Piece]]:
    held = HeldTokens(stream_interval)
    try:
        async for pieces in batches:
            if ready := held.take(pieces):
                yield ready
    except TidemillError:
        if rest := held.release():
            yield rest
        raise


@dataclass(slots=True)
class _Choice:
    chunks: list[Chunk] = field(default_factory=list)
    num_tokens: int = 0
    has_begun: bool = False


class HeldTokens:
    """What has come of each choice, by its job and number, and is not to be told yet."""

    def __init__(self, stream_interval: int) -> None:
        self._least = stream_interval
        self._choices: dict[tuple[int, int], _Choice] = {}

    def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Hold these pieces; returns what is to be told now."""
        ready: list[Piece] = []
        for piece in pieces:
            if piece.chunk is not None:
                ready += self._hold(piece.job, piece.chunk)
            if piece.end is not None:
                ready += [*self.release(piece.job), Piece(piece.job, end=piece.end)]
        return ready

    def release(self, job: int | None = None) -> list[Piece]:
        """Return all that is held, of one job or of all."""
        keys = [key for key in self._choices if job in (None, key[0])]
        return [Piece(key[0], _joined(self._drain(key))) for key in keys if self._holds(key)]

    def _hold(self, job: int, chunk: Chunk) -> list[Piece]:
        key = job, chunk.choice
        choice = self._choices.setdefault(key, _Choice())
        choice.chunks.append(chunk)
        choice.num_tokens += len(chunk.ids)
        if choice.has_begun and choice.num_tokens < self._least:
            return []
        choice.has_begun = True
        return [Piece(job, _joined(self._drain(key)))]

    def _holds(self, key: tuple[int, int]) -> bool:
        return bool(self._choices[key].chunks)

    def _drain(self, key: tuple[int, int]) -> list[Chunk]:
        choice = self._choices[key]
        chunks, choice.chunks, choice.num_tokens = choice.chunks, [], 0
        return chunks


def _joined(chunks: list[Chunk]) -> Chunk:
    if len(chunks) == 1:
        return chunks[0]
    told = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    return replace(
        chunks[-1],
        start=chunks[0].start,
        ids=tuple(token_id for chunk in chunks for token_id in chunk.ids),
        text="".join(chunk.text for chunk in chunks),
        logprobs=tuple(entry for entries in told for entry in entries) if told else None,
    )
