"""Which attention a model of `transformers` computes, learnt by running it without weights.

The model is made on torch's meta device, where tensors have shapes and no content, and put through
one forward.  Its calls of the attention function, in order, are its layers.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface

from tidemill.protocol.errors import TidemillError
from tidemill_gpuworker.transformers_backend.masks import MaskFunction, window_of

_PROBE_NAME = "tidemill_survey"
_NUM_TOKENS = 5

#: Why a model with attention of its own kind is unsuited.
NO_INTERFACE = "its attention does not go through the attention interface of transformers"
#: Options of an attention call that are heeded, and such that change nothing about it.
_HEEDED = ("scaling", "softcap", "s_aux", "sliding_window", "is_causal", "dropout")
_HARMLESS = (
    *("position_ids", "position_embeddings", "cache_position", "layer_idx", "use_cache"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    *("logits_to_keep", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
)


class Unsuited(Exception):
    """The model computes something other than causal attention through the interface."""


@dataclass(frozen=True, slots=True)
class SurveyedLayer:
    """One attention layer: the name of its module, its heads and its window (0 for none)."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int


@dataclass(frozen=True, slots=True)
class Survey:
    """The attention layers of a model and the width of its logits."""

    layers: tuple[SurveyedLayer, ...]
    vocab_size: int


@dataclass(slots=True)
class _Call:
    module: torch.nn.Module
    query: torch.Size
    key: torch.Size
    value: torch.Size
    mask: torch.Tensor | None
    options: Mapping[str, Any]


@dataclass(slots=True)
class _Notes:
    calls: list[_Call] = field(default_factory=list)
    #: Each mask is a tensor without content, which must reach the attention as it is.
    masks: list[tuple[torch.Tensor, MaskFunction]] = field(default_factory=list)


def survey(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    max_model_len: int,
    prepare: Callable[[PreTrainedModel], None] = lambda model: None,
) -> Survey:
    """Return what the model does once ``prepare`` has changed it; ``config`` is changed.

    Raises:
        Unsuited: it cannot run over a paged cache; the message says why.
    """
    notes = _Notes()
    with _probes(notes), torch.inference_mode():
        try:
            logits, names = _run(model_class, config, prepare)
        except (TidemillError, Unsuited):
            raise
        except Exception as error:  # the model's own code may raise anything
            raise Unsuited(f"a dry run without weights failed: {error}") from error
    if not notes.calls:
        raise Unsuited(NO_INTERFACE)
    layers = tuple(_layer(call, names, notes, max_model_len) for call in notes.calls)
    if len({layer.name for layer in layers}) < len(layers):
        raise Unsuited("a layer is computed more than once for each token")
    return Survey(layers, logits.shape[-1])


def _run(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    prepare: Callable[[PreTrainedModel], None],
) -> tuple[torch.Tensor, dict[torch.nn.Module, str]]:
    config._attn_implementation = _PROBE_NAME
    if model_class._can_set_experts_implementation():
        config._experts_implementation = _PROBE_NAME
    with torch.device("meta"):
        model = model_class(config).eval()
        prepare(model)
        ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64)
        positions = torch.arange(_NUM_TOKENS)[None]
        # With a mask of ones nobody looks into the positions, which have no content here.
        out = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            position_ids=positions,
            use_cache=False,
        )
    return out.logits, {module: name for name, module in model.named_modules()}


@contextmanager
def _probes(notes: _Notes) -> Iterator[None]:
    def note_call(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        shapes = query.shape, key.shape, value.shape
        notes.calls.append(_Call(module, *shapes, attention_mask, options))
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None

    def note_mask(mask_function: MaskFunction, **_: Any) -> torch.Tensor:
        mask = torch.empty(1, 1, _NUM_TOKENS, _NUM_TOKENS, device="meta")
        notes.masks.append((mask, mask_function))
        return mask

    registries = (
        (AttentionInterface, note_call),
        (AttentionMaskInterface, note_mask),
        # Which experts a token goes to would depend on its content.
        (ExpertsInterface, lambda module, hidden, *args, **options: torch.empty_like(hidden)),
    )
    for registry, probe in registries:
        registry.register(_PROBE_NAME, probe)
    try:
        yield
    finally:
        for registry, _ in registries:
            registry._global_mapping.pop(_PROBE_NAME, None)


def _layer(
    call: _Call, names: Mapping[torch.nn.Module, str], notes: _Notes, max_model_len: int
) -> SurveyedLayer:
    strange = sorted(
        name
        for name, value in call.options.items()
        if name not in (*_HEEDED, *_HARMLESS) and value is not None
    )
    if strange:
        raise Unsuited(f"its attention asks for {', '.join(strange)}")
    if call.options.get("is_causal") is False or call.query[2] != call.key[2]:
        raise Unsuited("its attention is not causal")
    scaling = call.options.get("scaling")
    return SurveyedLayer(
        name=names[call.module],
        num_heads=call.query[1],
        num_kv_heads=call.key[1],
        head_dim=call.key[3],
        value_dim=call.value[3],
        scale=call.query[3] ** -0.5 if scaling is None else float(scaling),
        window=_window(call, notes, max_model_len),
    )


def _window(call: _Call, notes: _Notes, max_model_len: int) -> int:
    if call.mask is None:
        window = int(call.options.get("sliding_window") or 0)
        return window if window < max_model_len else 0
    for mask, function in notes.masks:
        if mask is call.mask:
            found = _try_window(function, max_model_len)
            if found is None:
                raise Unsuited("its attention mask is neither causal nor a sliding window")
            return found
    raise Unsuited("it adds something to its attention mask")


def _try_window(mask: MaskFunction, max_model_len: int) -> int | None:
    try:
        return window_of(mask, max_model_len)
    except (RuntimeError, IndexError):
        # The mask reads a tensor, which has no content here: it is more than a rule of positions.
        return None
