"""A job of kind transcribe inside its engine: what is done, and the window it is at."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tidemill.protocol.outcomes import Outcome, Segment, Transcript, Word
from tidemill.protocol.requests import TranscribeRequest
from tidemill_gpuworker.engine.sequence import PriorityClass
from tidemill_gpuworker.speech.transcript import FRAMES_PER_SECOND, WINDOW_FRAMES, WindowText
from tidemill_gpuworker.speech.vocabulary import Vocabulary

_POSITIONS_PER_WINDOW = 1500


@dataclass(frozen=True, slots=True)
class Audio:
    """Log-mel features [bins, frames] with a window of silence at the end, which does not count."""

    features: torch.Tensor
    num_frames: int

    def window(self, seek: int) -> torch.Tensor:
        """Return the features [bins, 3000] from frame ``seek`` on."""
        return self.features[:, seek : seek + WINDOW_FRAMES]


@dataclass(slots=True, eq=False)
class SpeechJob:
    """One job's audio, its transcript so far, and all tokens of the decoder.

    ``history`` are the tokens that the next window is told as what came before it; ``partial`` is
    the beginning of its own tokens that an earlier attempt has published.
    """

    seq_id: str
    request: TranscribeRequest
    audio: Audio
    history: list[int] = field(default_factory=list)
    priority: int = 0
    output_ids: list[int] = field(default_factory=list)
    num_resumed_tokens: int = 0
    partial: tuple[int, ...] = ()
    seek: int = 0
    language: str | None = None
    segments: list[Segment] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_windows: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Positions of the audio's windows."""
        return -(-self.audio.num_frames // WINDOW_FRAMES) * _POSITIONS_PER_WINDOW

    @property
    def num_left_tokens(self) -> int:
        """Positions that are still to be encoded."""
        left = max(0, self.audio.num_frames - self.seek)
        return -(-left // WINDOW_FRAMES) * _POSITIONS_PER_WINDOW

    @property
    def is_done(self) -> bool:
        """Whether all of the audio was read."""
        return self.seek >= self.audio.num_frames

    @property
    def window_frames(self) -> int:
        """Frames of audio in the current window."""
        return min(WINDOW_FRAMES, self.audio.num_frames - self.seek)

    @property
    def has_timestamps(self) -> bool:
        """Whether the decoder writes timestamps: unasked too, where windows must fit together."""
        return self.request.timestamps != "none" or self.audio.num_frames > WINDOW_FRAMES

    @property
    def priority_class(self) -> PriorityClass:
        """The class of the job's priority."""
        if self.priority > 0:
            return PriorityClass.BATCH
        return PriorityClass.INTERACTIVE if self.priority else PriorityClass.STANDARD

    def advance(self, window: WindowText, segments: Sequence[Segment], *, reset: bool) -> None:
        """Go on behind a window; with ``reset`` the next one is not told what came before it."""
        self.segments += segments
        self.seek += window.num_frames
        self.num_windows += 1
        self.partial = ()
        if reset:
            self.history.clear()
        else:
            self.history += [token_id for piece in window.pieces for token_id in piece.ids]

    def outcome(self) -> Outcome:
        """Return the transcript."""
        seconds = self.audio.num_frames / FRAMES_PER_SECOND
        has_times = self.request.timestamps != "none"
        return Outcome(
            transcript=Transcript(
                language=self.language or "en",
                seconds=seconds,
                segments=tuple(self.segments) if has_times else (),
            )
        )


def make_segments(
    window: WindowText,
    vocabulary: Vocabulary,
    texts: Sequence[str],
    words: Sequence[Sequence[Word]],
    stats: dict[str, float],
    end: float,
) -> list[Segment]:
    """Return the segments of a window that hold text, none of them behind the audio's ``end``."""
    segments = []
    for piece, text, own in zip(window.pieces, texts, words, strict=True):
        if text.strip():
            start = min(piece.start, end)
            segments.append(
                Segment(
                    text=text,
                    start=start,
                    end=max(start, min(piece.end, end)),
                    words=tuple(own),
                    **stats,
                )
            )
    return segments
