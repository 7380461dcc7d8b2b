"""Leaves of a model of `transformers` the part that one rank computes.

What is split, and where the parts are put together, is the plan for tensor parallelism that
`transformers` ships with the model; it is read here and applied to plain modules.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tidemill_gpuworker.parallel.collectives import Collectives, NoCollectives
from tidemill_gpuworker.parallel.shard import Shard
from tidemill_gpuworker.parallel.split_config import indivisible
from tidemill_gpuworker.transformers_backend.survey import Unsuited

Hook = Callable[[torch.Tensor], torch.Tensor]

#: Styles of a plan: which dimension of a layer's weight is split.  What all ranks hold whole, such
#: as the embedding, has a style that is left out here.
_COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep")
_ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep")
_GATHERED = ("colwise_gather_output", "colwise_rep")
_CUT_INPUT = ("rowwise_split_input", "rowwise_rep")
_PACKED = "packed_colwise"
_SUMMED = ("moe_tp_experts", "all_reduce")
_WHOLE = (
    *("embedding_rowwise", "embedding_colwise", "replicate", "replicated_with_grad_allreduce"),
    *("mla_kv_a_proj", "local_params"),
)
_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class DryRanks(NoCollectives):
    """Other ranks of whose results only the shape is wanted."""

    def __init__(self, count: int) -> None:
        self._count = count

    def gather_features(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor as wide as those of all ranks together."""
        return torch.cat([x] * self._count, dim=-1)

    def put_together(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor as wide as those of all ranks together."""
        return self.gather_features(x)


def split_model(model: PreTrainedModel, shard: Shard, ranks: Collectives) -> None:
    """Leave of ``model`` the part ``shard``, which computes together with ``ranks``; in place.

    Raises:
        ConfigError: a size is no multiple of the number of parts.
        Unsuited: `transformers` has no plan for the model, or one that is not understood.
    """
    head = model.get_output_embeddings()
    styles = styles_of(model, head)
    parameters = dict(model.named_parameters())
    for name, style in styles.items():
        if name in parameters:
            _cut_parameter(model, name, style, shard)
        else:
            _cut_module(model.get_submodule(name), name, style, shard, ranks)
    if splits_head(head, shard):
        part = head.weight.shape[0] // shard.count
        # A view, as the embedding may be the same tensor and stays whole.
        _set(head, "weight", head.weight.narrow(0, part * shard.index, part))
        if head.bias is not None:
            _set(head, "bias", head.bias.narrow(0, part * shard.index, part).clone())
        _after(head, ranks.put_together)


def styles_of(model: PreTrainedModel, head: nn.Module) -> Mapping[str, str]:
    """Return the plan's style of each module and parameter that is split, but for the head.

    Raises ``Unsuited`` if there is none or a style is not known.
    """
    plan = model.tp_plan or {}
    names = [name for name, module in model.named_modules() if module is not head]
    names += [name for name, _ in model.named_parameters()]
    found = {name: plan.get(_LAYER_NUMBER.sub("*", name)) for name in names}
    styles = {name: style for name, style in found.items() if style and style not in _WHOLE}
    if not styles:
        raise Unsuited("transformers has no plan for splitting its layers")
    known = {*_COLUMNS, *_ROWS, _PACKED, *_SUMMED}
    for name, style in styles.items():
        if style not in known:
            raise Unsuited(f"its plan splits {name} by {style!r}, which is not supported")
    return styles


def splits_head(head: Any, shard: Shard) -> bool:
    """Whether each rank computes a part of the vocabulary; if not, the leader computes it all."""
    rows: int = head.weight.shape[0]
    return isinstance(head, nn.Linear) and not shard.is_whole and rows % shard.count == 0


def splits_attention(styles: Mapping[str, str], layer: str) -> bool:
    """Whether each rank computes a part of the heads of the attention module ``layer``."""
    return any(
        style == "colwise" and name.startswith(f"{layer}.") for name, style in styles.items()
    )


def _cut_module(module: nn.Module, name: str, style: str, shard: Shard, ranks: Collectives) -> None:
    if style in _SUMMED:
        _after(module, ranks.add_up)
        return
    if not isinstance(module, nn.Linear):
        raise Unsuited(f"its plan splits {name}, which is no linear layer")
    if style in _ROWS:
        _cut_rows(module, name, shard)
        _after(module, ranks.add_up)
    else:
        for kind in [kind for kind in ("weight", "bias") if getattr(module, kind) is not None]:
            _cut(module, kind, f"the outputs of {name}", 0, shard, packed=style == _PACKED)
    module.out_features, module.in_features = module.weight.shape
    if style in _GATHERED:
        _after(module, ranks.gather_features)
    if style in _CUT_INPUT:
        module.register_forward_pre_hook(partial(_take_part, module.in_features, shard.index))


def _cut_rows(module: nn.Linear, name: str, shard: Shard) -> None:
    _cut(module, "weight", f"the inputs of {name}", 1, shard)
    if shard.index:
        # Added once, by one rank.
        module.register_parameter("bias", None)


def _cut_parameter(model: nn.Module, name: str, style: str, shard: Shard) -> None:
    parent, _, kind = name.rpartition(".")
    owner = model.get_submodule(parent)
    num_dims = getattr(owner, kind).dim()
    dim = num_dims - 1 if style in _ROWS or num_dims == 1 else num_dims - 2
    _cut(owner, kind, name, dim, shard, packed=style == _PACKED)


def _cut(
    owner: nn.Module, kind: str, what: str, dim: int, shard: Shard, *, packed: bool = False
) -> None:
    """Leave a part of a parameter; ``packed`` ones are two side by side along ``dim``."""
    whole: torch.Tensor = getattr(owner, kind)
    sections = 2 if packed else 1
    size = whole.shape[dim]
    if size % (sections * shard.count):
        raise indivisible(what, size // sections, shard.count)
    parts = [each.chunk(shard.count, dim)[shard.index] for each in whole.chunk(sections, dim)]
    # A copy, so that the whole can be freed.
    _set(owner, kind, torch.cat(parts, dim))


def _set(owner: nn.Module, kind: str, part: torch.Tensor) -> None:
    setattr(owner, kind, nn.Parameter(part.detach(), requires_grad=False))


def _after(module: nn.Module, hook: Hook) -> None:
    module.register_forward_hook(lambda _, __, output: hook(output))


def _take_part(
    size: int, index: int, module: nn.Module, arguments: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    return arguments[0].narrow(-1, size * index, size)
