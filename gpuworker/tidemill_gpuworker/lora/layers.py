"""Applies adapters to the linear layers of a model, several in one step.

A layer with weight W and an adapter of matrices A [rank, in], B [out, rank] computes
W x + scale B (A x) (Hu et al., 2021).  Tokens of a flat batch are grouped by adapter.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from itertools import accumulate, count
from pathlib import Path
from typing import Protocol

import torch
from torch.nn import functional

from tidemill.protocol.errors import DamagedModel, UnsupportedModel
from tidemill_gpuworker.models.linear import Linear
from tidemill_gpuworker.parallel.linear_part import LinearPart, ranges_of
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


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoadedAdapter:
    """The weights of an adapter on the device; who holds it may use it, loaded or not.

    ``key`` is its number among all that were loaded.
    """

    name: str
    digest: str
    deltas: dict[str, _Delta]
    num_bytes: int
    key: int = 0


#: The rows of a step's flat batch that belong to each adapter, as pairs of start and end.
Spans = Mapping[LoadedAdapter, Several[tuple[int, int]]]


class AdapterWeights(Protocol):
    """The matrices of an adapter, wherever they come from."""

    @property
    def directory(self) -> Path:
        """Where the adapter was found."""
        ...

    @property
    def digest(self) -> str:
        """What tells versions of it apart."""
        ...

    @property
    def modules(self) -> list[str]:
        """Names of the layers that it changes."""
        ...

    def matrices(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [rank, in features] and B [out features, rank] of a layer, B scaled; float32."""
        ...


@dataclass(frozen=True, slots=True)
class HeldAdapter:
    """The matrices of an adapter in memory."""

    directory: Path
    digest: str
    layers: dict[str, tuple[torch.Tensor, torch.Tensor]]

    @property
    def modules(self) -> list[str]:
        """Names of the layers that it changes."""
        return sorted(self.layers)

    def matrices(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [rank, in features] and B [out features, rank] of a layer, B scaled."""
        return self.layers[module]


def hold(weights: AdapterWeights) -> HeldAdapter:
    """Read all matrices at once."""
    layers = {module: weights.matrices(module) for module in weights.modules}
    return HeldAdapter(weights.directory, weights.digest, layers)


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


class AdaptableLayers:
    """The linear layers of one model that adapters may change."""

    def __init__(self) -> None:
        self._targets: dict[str, LinearPart] = {}
        self._step = _Step()
        self._keys = count(1)

    def wrap(self, part: LinearPart, linear: Linear) -> Linear:
        """Return ``linear``, a part of some layers as one, so that adapters can change it."""
        if any(_EXPERTS in name for name in part.names):
            return linear
        self._targets.update(dict.fromkeys(part.names, part))
        return AdaptedLinear(part.names[0], linear, self._step)

    def load(
        self, name: str, files: AdapterWeights, dtype: torch.dtype, device: torch.device
    ) -> LoadedAdapter:
        """Bring an adapter's weights, or the part of this rank, to the device.

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
        targets = {self._targets[name].names[0]: self._targets[name] for name in files.modules}
        deltas = {key: _delta(target, files, dtype, device) for key, target in targets.items()}
        tensors = [t for d in deltas.values() for t in (d.down, *(part.up for part in d.parts))]
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        return LoadedAdapter(name, files.digest, deltas, num_bytes, next(self._keys))

    def begin(self, spans: Spans, device: torch.device) -> None:
        """Let each adapter change its rows of the next step."""
        self._step.groups = [_Group(each, _rows(rows, device)) for each, rows in spans.items()]


def spans_of(scheduled: Several[ScheduledSequence]) -> Spans:
    """Return which rows of the step's flat batch belong to which adapter."""
    spans: dict[LoadedAdapter, list[tuple[int, int]]] = {}
    start = 0
    for item in scheduled:
        end = start + item.num_tokens
        if item.seq.adapter is not None:
            spans.setdefault(item.seq.adapter, []).append((start, end))
        start = end
    return spans


def _rows(spans: Several[tuple[int, int]], device: torch.device) -> slice | torch.Tensor:
    first, last = spans[0][0], spans[-1][1]
    if sum(end - start for start, end in spans) == last - first:
        return slice(first, last)
    return torch.tensor([row for span in spans for row in range(*span)], device=device)


def _delta(
    target: LinearPart, files: AdapterWeights, dtype: torch.dtype, device: torch.device
) -> _Delta:
    (inputs,) = ranges_of([target.inputs])
    downs: list[torch.Tensor] = []
    parts: list[_Part] = []
    changed, rank = set(files.modules), 0
    ends = list(accumulate(target.rows))
    for part, end in zip(target.split(), ends, strict=True):
        (name,), (sections,), (size,), (whole,) = (
            *(part.names, part.outputs, part.rows, part.whole_rows),
        )
        if name in changed:
            down, up = files.matrices(name)
            _check_shapes(files, name, down, up, whole, part.inputs.whole_size)
            ranks = slice(rank, rank := rank + down.shape[0])
            downs.append(down[:, inputs])
            up = torch.cat([up[rows] for rows in ranges_of(sections)])
            parts.append(_Part(slice(end - size, end), ranks, up.to(device, dtype)))
    return _Delta(torch.cat(downs).to(device, dtype), tuple(parts))


def _check_shapes(
    files: AdapterWeights,
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
