"""The attention function that models of `transformers` call, over the paged KV cache.

`transformers` looks attention up by name in a registry; the name is ours while a model serves.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from tidemill_gpuworker.engine.inputs import StepInputs
from tidemill_gpuworker.memory.kv_cache import KVCache
from tidemill_kernels import AttentionBackend

#: `transformers` makes no mask for a name that its registry of masks does not have.
ATTENTION_NAME = "tidemill_paged"
_LAYER = "tidemill_layer"


@dataclass(slots=True)
class RunningStep:
    """The step that a model is computing; shared by its layers, set before each forward."""

    inputs: StepInputs
    cache: KVCache
    backend: AttentionBackend


class StepSlot:
    """Where the layers of one model find its running step."""

    def __init__(self) -> None:
        self.step: RunningStep | None = None


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """One attention layer: its place in the cache and how far it sees (0: everything)."""

    index: int
    window: int
    slot: StepSlot

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        soft_cap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the attention of ``query`` [tokens, heads, head_dim], all heads as wide as values.

        Stores ``key`` and ``value`` [tokens, kv_heads, ...] in the cache first.
        """
        step = self.slot.step
        assert step is not None, "the model was called outside of a step"
        cache = step.cache.layers[self.index]
        num_added = key.shape[-1] - value.shape[-1]
        padded = functional.pad(value, (0, num_added)) if num_added else value
        # A quantised cache takes any dtype, and its queries keep theirs.
        dtype = cache.keys.dtype if cache.scales is None else query.dtype
        query, key, padded = (_rows(part, dtype) for part in (query, key, padded))
        tensors = (cache.keys, cache.values)
        step.backend.reshape_and_cache(
            *(key, padded, *tensors, step.inputs.slot_mapping), cache.scales
        )
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        step.backend.paged_attention(
            *(out, query, *tensors, step.inputs.metadata, scale),
            window=self.window,
            soft_cap=soft_cap,
            sinks=sinks,
            scales=cache.scales,
        )
        return out[..., : value.shape[-1]] if num_added else out


def set_layer(module: torch.nn.Module, layer: PagedLayer) -> None:
    """Let ``module``, which computes attention, use the cache as ``layer``."""
    setattr(module, _LAYER, layer)


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as `transformers` asks for it: all of [1, heads, tokens, head_dim].

    Returns [1, tokens, heads, head_dim], and no weights.
    """
    layer: PagedLayer = getattr(module, _LAYER)
    out = layer.attend(
        *(part[0].transpose(0, 1) for part in (query, key, value)),
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        soft_cap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.flatten().float().contiguous(),
    )
    return out[None].to(query.dtype), None


def register() -> None:
    """Make ``ATTENTION_NAME`` known to `transformers`."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


def _rows(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    part = part.to(dtype)
    return part if part.stride(-1) == 1 else part.contiguous()
