"""Applies adapters to the linear layers of a model, several in one step.

A layer with weight W and an adapter of matrices A [rank, in], B [out, rank] computes
W x + scale B (A x) (Hu et al., 2021).  Tokens of a flat batch are grouped by adapter.
"""

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch.nn import functional

from tidemill.protocol.errors import DamagedModel, UnsupportedModel
from tidemill_gpuworker.lora.adapter_files import AdapterFiles
from tidemill_gpuworker.models.linear import Linear
from tidemill_gpuworker.steps.step_plan import ScheduledSequence

#: Experts see the tokens that were routed to them, in an order of their own.
_EXPERTS = ".experts."


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the layers that were fused into one: where its output and its ranks are."""

    outputs: slice
    ranks: slice
    up: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Delta:
    """What an adapter adds to one layer: ``down`` [ranks, in] of all parts, and their ``up``."""

    down: torch.Tensor
    parts: tuple[_Part, ...]

    def add_to(self, y: torch.Tensor, x: torch.Tensor, rows: slice | torch.Tensor) -> None:
        # y [tokens, out] of x [tokens, in]; changes y at ``rows``
        inner = functional.linear(x[rows], self.down)
        for part in self.parts:
            added = functional.linear(inner[:, part.ranks], part.up)
            if isinstance(rows, slice):
                y[rows, part.outputs].add_(added)
            else:
                y[:, part.outputs].index_add_(0, rows, added)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """The weights of an adapter on the device; who holds it may use it, loaded or not."""

    name: str
    digest: str
    deltas: dict[str, _Delta]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Group:
    adapter: LoadedAdapter
    rows: slice | torch.Tensor


@dataclass(slots=True)
class _Step:
    """Which rows of the current step belong to which adapter."""

    groups: list[_Group] = field(default_factory=list)


class AdaptedLinear:
    """A linear layer, or several fused into one, with what the adapters of the step add."""

    def __init__(self, key: str, linear: Linear, step: _Step) -> None:
        self._key = key
        self._linear = linear
        self._step = step

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return a new [rows, out_features] tensor of x's dtype."""
        y = self._linear(x)
        for group in self._step.groups:
            delta = group.adapter.deltas.get(self._key)
            if delta is not None:
                delta.add_to(y, x, group.rows)
        return y


@dataclass(frozen=True, slots=True)
class _Target:
    names: tuple[str, ...]
    rows: tuple[int, ...]
    in_features: int

    @property
    def key(self) -> str:
        return self.names[0]


class AdaptableLayers:
    """The linear layers of one model that adapters may change."""

    def __init__(self) -> None:
        self._targets: dict[str, _Target] = {}
        self._step = _Step()

    def wrap(
        self, names: Several[str], rows: Several[int], in_features: int, linear: Linear
    ) -> Linear:
        """Return ``linear``, the layers ``names`` as one, so that adapters can change it."""
        if any(_EXPERTS in name for name in names):
            return linear
        target = _Target(tuple(names), tuple(rows), in_features)
        self._targets.update(dict.fromkeys(names, target))
        return AdaptedLinear(target.key, linear, self._step)

    def load(
        self, name: str, files: AdapterFiles, dtype: torch.dtype, device: torch.device
    ) -> LoadedAdapter:
        """Bring an adapter's weights to the device.

        Raises:
            UnsupportedModel: it changes a layer that the model does not have or that is fixed.
            DamagedModel: one of its matrices does not fit the layer.
        """
        for module in files.modules:
            if module not in self._targets:
                raise UnsupportedModel(
                    f"{files.directory}: layer {module} of the adapter is none that can be adapted",
                    fix="Use an adapter that was trained for this model and its linear layers.",
                )
        targets = {self._targets[module].key: self._targets[module] for module in files.modules}
        deltas = {key: _delta(target, files, dtype, device) for key, target in targets.items()}
        tensors = [t for d in deltas.values() for t in (d.down, *(part.up for part in d.parts))]
        return LoadedAdapter(name, files.digest, deltas, sum(tensor.nbytes for tensor in tensors))

    def begin(self, scheduled: Several[ScheduledSequence], device: torch.device) -> None:
        """Note which rows of the step's flat batch belong to which adapter."""
        spans: dict[LoadedAdapter, list[tuple[int, int]]] = {}
        start = 0
        for item in scheduled:
            end = start + item.num_tokens
            if item.seq.adapter is not None:
                spans.setdefault(item.seq.adapter, []).append((start, end))
            start = end
        self._step.groups = [_Group(each, _rows(span, device)) for each, span in spans.items()]


def _rows(spans: list[tuple[int, int]], device: torch.device) -> slice | torch.Tensor:
    first, last = spans[0][0], spans[-1][1]
    if sum(end - start for start, end in spans) == last - first:
        return slice(first, last)
    return torch.tensor([row for span in spans for row in range(*span)], device=device)


def _delta(
    target: _Target, files: AdapterFiles, dtype: torch.dtype, device: torch.device
) -> _Delta:
    downs: list[torch.Tensor] = []
    parts: list[_Part] = []
    changed, rank = set(files.modules), 0
    ends = list(accumulate(target.rows))
    for name, size, end in zip(target.names, target.rows, ends, strict=True):
        if name in changed:
            down, up = files.matrices(name)
            _check_shapes(files, name, down, up, size, target.in_features)
            ranks = slice(rank, rank := rank + down.shape[0])
            downs.append(down)
            parts.append(_Part(slice(end - size, end), ranks, up.to(device, dtype)))
    return _Delta(torch.cat(downs).to(device, dtype), tuple(parts))


def _check_shapes(
    files: AdapterFiles,
    name: str,
    down: torch.Tensor,
    up: torch.Tensor,
    out_features: int,
    in_features: int,
) -> None:
    expected = (down.shape[0], in_features), (out_features, down.shape[0])
    if (tuple(down.shape), tuple(up.shape)) != expected:
        raise DamagedModel(
            f"{files.directory}: the matrices of {name} are {list(down.shape)} and"
            f" {list(up.shape)}, the model's layer is [{out_features}, {in_features}]",
            fix="Use an adapter that was trained for this model.",
        )
