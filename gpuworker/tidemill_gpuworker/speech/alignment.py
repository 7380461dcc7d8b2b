"""When each word was said: attention to the audio, followed by dynamic time warping.

The method of the reference code of Whisper (arXiv 2212.04356, word timestamps): attention of heads
that follow the audio is normalised over the tokens, smoothed along time and averaged; the cheapest
monotone path through it says at which frame each token begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tidemill.service.tokenizer import Tokenizer

#: Positions of the encoder a second.
POSITIONS_PER_SECOND = 50
_FILTER_WIDTH = 7
#: Languages that are written without spaces.
_UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue"})

Path = tuple[NDArray[np.intp], NDArray[np.intp]]


@dataclass(frozen=True, slots=True)
class WordTokens:
    """A word and how many tokens it takes."""

    text: str
    num_tokens: int


def cost_matrix(attention: torch.Tensor, num_positions: int) -> NDArray[np.float64]:
    """Return costs [tokens, positions] of attention [heads, tokens, positions]."""
    weights = attention[:, :, :num_positions].double()
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    smooth = _median_filter((weights - mean) / std.clamp_min(1e-12))
    costs: NDArray[np.float64] = -smooth.mean(dim=0).numpy()
    return costs


def warp(costs: NDArray[np.float64]) -> Path:
    """Return the cheapest monotone path through costs [tokens, positions] as two lists of indices.

    Works diagonal by diagonal, whose cells do not depend on each other.
    """
    num_rows, num_columns = costs.shape
    total: NDArray[np.float64] = np.full((num_rows + 1, num_columns + 1), np.inf)
    step: NDArray[np.int8] = np.zeros((num_rows + 1, num_columns + 1), dtype=np.int8)
    total[0, 0] = 0.0
    for diagonal in range(2, num_rows + num_columns + 1):
        rows = np.arange(max(1, diagonal - num_columns), min(num_rows, diagonal - 1) + 1)
        columns = diagonal - rows
        before = np.stack(
            (
                total[rows - 1, columns - 1],
                total[rows - 1, columns],
                total[rows, columns - 1],
            )
        )
        chosen = before.argmin(axis=0)
        step[rows, columns] = chosen
        total[rows, columns] = costs[rows - 1, columns - 1] + before.min(axis=0)
    return _walk_back(step)


def token_times(path: Path) -> NDArray[np.float64]:
    """Return the second at which each token of a path begins."""
    rows, columns = path
    begins = np.concatenate(([True], np.diff(rows) > 0))
    times: NDArray[np.float64] = columns[begins] / POSITIONS_PER_SECOND
    return times


def split_words(ids: Sequence[int], tokenizer: Tokenizer, language: str) -> list[WordTokens]:
    """Return the words of text tokens; punctuation belongs to the word before it."""
    words: list[WordTokens] = []
    for text, count in _whole_characters(ids, tokenizer):
        is_new = not words or text.startswith(" ") or language in _UNSPACED
        if is_new and not (words and _is_punctuation(text)):
            words.append(WordTokens(text, count))
        else:
            words[-1] = WordTokens(words[-1].text + text, words[-1].num_tokens + count)
    return words


def _whole_characters(ids: Sequence[int], tokenizer: Tokenizer) -> list[tuple[str, int]]:
    pieces: list[tuple[str, int]] = []
    begin = 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[begin:end])
        # Half of a character decodes to the replacement character.
        if "\ufffd" not in text or end == len(ids):
            pieces.append((text, end - begin))
            begin = end
    return pieces


def _is_punctuation(text: str) -> bool:
    stripped = text.strip()
    return bool(stripped) and not text.startswith(" ") and not any(map(str.isalnum, stripped))


def _median_filter(x: torch.Tensor) -> torch.Tensor:
    reach = _FILTER_WIDTH // 2
    if x.shape[-1] <= reach:
        return x
    padded = functional.pad(x, (reach, reach), mode="reflect")
    return padded.unfold(-1, _FILTER_WIDTH, 1).sort(dim=-1).values[..., reach]


def _walk_back(step: NDArray[Any]) -> Path:
    row, column = step.shape[0] - 1, step.shape[1] - 1
    path = []
    while row > 0 and column > 0:
        path.append((row - 1, column - 1))
        move = step[row, column]
        row -= int(move != 2)
        column -= int(move != 1)
    rows, columns = np.array(path[::-1]).T
    return rows, columns
