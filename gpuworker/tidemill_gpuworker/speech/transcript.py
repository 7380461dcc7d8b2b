"""What the tokens of a window say, and where the next window begins: pure.

The token log of a transcription is the decoder's own: each window is its opening, its tokens and
an end: the end of text or, if the next window is not to be told what came before it, the token
that begins such a prompt.  So whoever takes the job over knows all that matters from the log alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill_gpuworker.speech.vocabulary import TIME_PRECISION, Vocabulary

#: Frames of a window, frames a second, and frames of one timestamp step.
WINDOW_FRAMES = 3000
FRAMES_PER_SECOND = 100
_FRAMES_PER_STEP = 2


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens between two timestamps, in seconds from the start of the audio."""

    start: float
    end: float
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WindowText:
    """What a window holds, and by how many frames the next one begins later."""

    pieces: tuple[Piece, ...]
    num_frames: int


def read_window(
    ids: Sequence[int], seek: int, num_frames: int, vocabulary: Vocabulary
) -> WindowText:
    """Cut the sampled tokens of the window at frame ``seek``, of ``num_frames``, at its timestamps.

    The next window begins where the last whole segment ends, so that no word is cut, or behind
    this window if the speech ends in it.
    """
    offset, begin = seek / FRAMES_PER_SECOND, vocabulary.first_timestamp
    is_time = [token_id >= begin for token_id in ids]
    cuts = [i for i in range(1, len(ids)) if is_time[i - 1] and is_time[i]]
    if not cuts:
        times = [token_id - begin for token_id in ids if token_id >= begin]
        length = times[-1] * TIME_PRECISION if times and times[-1] else num_frames / 100
        piece = Piece(offset, offset + length, tuple(ids))
        return WindowText((piece,), num_frames)
    ends_alone = is_time[-2:] == [False, True]
    if ends_alone:
        cuts.append(len(ids))
    pieces, last = [], 0
    for cut in cuts:
        inside = tuple(ids[last:cut])
        start, end = (token - begin for token in (inside[0], inside[-1]))
        pieces.append(Piece(offset + start * TIME_PRECISION, offset + end * TIME_PRECISION, inside))
        last = cut
    if ends_alone:
        return WindowText(tuple(pieces), num_frames)
    # A timestamp of zero would have us decode the same window for ever.
    moved = (ids[last - 1] - begin) * _FRAMES_PER_STEP
    return WindowText(tuple(pieces), moved if moved > 0 else num_frames)


@dataclass(frozen=True, slots=True)
class LoggedWindow:
    """The opening and the tokens of a window; ``resets`` if what it says is not told the next."""

    ids: tuple[int, ...]
    resets: bool


def window_end(vocabulary: Vocabulary, *, resets: bool) -> int:
    """Return the token that ends a window in the log."""
    return vocabulary.previous if resets else vocabulary.end


def split_log(ids: Sequence[int], vocabulary: Vocabulary) -> tuple[list[LoggedWindow], int]:
    """Return the whole windows of a token log, and how many of its tokens they are.

    What is left behind them was written of a window that was not told whole.
    """
    windows, start = [], 0
    for position, token_id in enumerate(ids):
        if token_id in (vocabulary.end, vocabulary.previous):
            resets = token_id == vocabulary.previous
            windows.append(LoggedWindow(tuple(ids[start:position]), resets))
            start = position + 1
    return windows, start
