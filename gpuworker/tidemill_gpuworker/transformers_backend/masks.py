"""What an attention mask of `transformers` lets a token see."""

from collections.abc import Callable
from typing import Any

import torch

#: ``mask(batch, head, query position, key position)``, all tensors, is true where a key is seen.
MaskFunction = Callable[[Any, Any, Any, Any], torch.Tensor]

#: Masks are not looked at further than this; a larger window counts as none.
_MAX_LENGTH = 1 << 20


def window_of(mask: MaskFunction, max_model_len: int) -> int | None:
    """Return the window of a causal mask: 0 if all is seen, None if it is no such mask.

    A window of w tokens lets a query at p see the keys p - w + 1 to p.
    """
    length = min(max_model_len, _MAX_LENGTH)
    last = _seen(mask, length - 1, length)
    window = int(last.sum())
    places = {0, 1, window - 1, window, window + 1, length // 2, length - 1}
    for place in sorted(place for place in places if 0 <= place < length):
        if not torch.equal(_seen(mask, place, length), _expected(place, window, length)):
            return None
    return 0 if window == length else window


def _seen(mask: MaskFunction, query: int, length: int) -> torch.Tensor:
    zero = torch.tensor(0)
    seen = mask(zero, zero, torch.tensor(query), torch.arange(length))
    return seen.expand(length)


def _expected(query: int, window: int, length: int) -> torch.Tensor:
    keys = torch.arange(length)
    return (keys <= query) & (keys > query - window)
