"""Attention of transformers over keys and values rounded to 8 bits, apart from our own code."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_NAME = "rounded_kv"
_LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
_FLOATS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def round_rows(rows: torch.Tensor, name: str) -> torch.Tensor:
    """Return rows [..., dim] as they come back from a cache of that dtype."""
    scales = rows.abs().amax(-1, keepdim=True) / _LARGEST[name]
    codes = rows / scales
    rounded = codes.round() if name == "int8" else codes.to(_FLOATS[name]).float()
    return rounded * scales


@contextmanager
def rounded_kv(model: transformers.PreTrainedModel, name: str) -> Iterator[None]:
    """Let the model attend to rounded keys and values, each head of a token by itself."""

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **options: Any,
    ) -> Any:
        rounded = (round_rows(key, name), round_rows(value, name))
        return sdpa_attention_forward(module, query, *rounded, mask, **options)

    transformers.AttentionInterface.register(_NAME, attend)
    transformers.AttentionMaskInterface.register(_NAME, transformers.masking_utils.sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
