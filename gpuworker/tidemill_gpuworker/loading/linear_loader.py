"""The linear layers of a checkpoint, whatever form their weights are stored in."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.models.linear import Linear, make_linear
from tidemill_gpuworker.quantization.linears import QuantizedLinear, SideBySide
from tidemill_gpuworker.quantization.on_the_fly import OnTheFly
from tidemill_gpuworker.quantization.scheme import QuantScheme
from tidemill_gpuworker.quantization.stacking import stack
from tidemill_gpuworker.quantization.stored_layer import QuantizedWeight, StoredLayer


def load_linear(
    checkpoint: Checkpoint,
    names: Sequence[str],
    rows: Sequence[int],
    in_features: int,
    *,
    with_bias: bool = False,
) -> Linear:
    """Return the layers called ``names``, which share their input, as one.

    Its output is theirs side by side; ``rows`` are their output features.  Raises as
    ``Checkpoint.stacked`` does, and as formats of quantised layers do.
    """
    linear = _load(_Parts(checkpoint, names, rows, in_features, with_bias))
    if checkpoint.wrap_linear is None:
        return linear
    return checkpoint.wrap_linear(names, rows, in_features, linear)


def _load(parts: "_Parts") -> Linear:
    scheme = parts.checkpoint.quantization
    if isinstance(scheme, QuantScheme):
        return parts.load_stored(scheme)
    if scheme is not None and all(scheme.takes(name) for name in parts.names):
        return parts.load_and_quantise(scheme)
    return parts.load_plain()


@dataclass(frozen=True, slots=True)
class _Parts:
    checkpoint: Checkpoint
    names: Sequence[str]
    rows: Sequence[int]
    in_features: int
    with_bias: bool

    def load_plain(self) -> Linear:
        return make_linear(self._plain_weight(), self._bias())

    def load_and_quantise(self, scheme: OnTheFly) -> Linear:
        weight = scheme.quantise(self._plain_weight())
        return self._finish(weight, was_plain=True)

    def load_stored(self, scheme: QuantScheme) -> Linear:
        weights = [self._read(scheme, *part) for part in zip(self.names, self.rows, strict=True)]
        present = [weight for weight in weights if weight is not None]
        if not present:
            return self.load_plain()
        whole = stack(present) if len(present) == len(weights) else None
        if whole is not None:
            return self._quantized(whole)
        return SideBySide(
            [
                part.load_plain() if weight is None else part._quantized(weight)
                for part, weight in zip(self._split(), weights, strict=True)
            ]
        )

    def _read(self, scheme: QuantScheme, name: str, rows: int) -> QuantizedWeight | None:
        found = scheme.format_of(name)
        layer = StoredLayer(self.checkpoint, name, rows, self.in_features)
        # Writers leave some layers plain that their lists do not tell of.
        return None if found is None or layer.is_plain() else found.read(layer)

    def _quantized(self, weight: QuantizedWeight) -> Linear:
        if not self.with_bias:
            self._drop_zero_biases()
        return self._finish(weight, was_plain=False)

    def _finish(self, weight: QuantizedWeight, *, was_plain: bool) -> Linear:
        layer = QuantizedLinear(weight, self._bias(), self.checkpoint.device)
        num_weights = sum(self.rows) * self.in_features
        self.checkpoint.count_quantized(num_weights, layer.num_bytes, was_plain=was_plain)
        return layer

    def _drop_zero_biases(self) -> None:
        """Take the biases of zeros that writers of GPTQ add to layers that have none."""
        for name in self.names:
            bias = f"{name}.bias"
            if self.checkpoint.stored_dtype(bias) is not None:
                self.checkpoint.take_zeros(bias)

    def _plain_weight(self) -> torch.Tensor:
        weights = [f"{name}.weight" for name in self.names]
        return self.checkpoint.stacked(weights, self.rows, self.in_features)

    def _bias(self) -> torch.Tensor | None:
        if not self.with_bias:
            return None
        return self.checkpoint.stacked([f"{name}.bias" for name in self.names], self.rows)

    def _split(self) -> list["_Parts"]:
        return [
            _Parts(self.checkpoint, [name], [count], self.in_features, self.with_bias)
            for name, count in zip(self.names, self.rows, strict=True)
        ]
