"""The linear layers of a checkpoint, whatever form their weights are stored in."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.models.linear import Linear, make_linear
from tidemill_gpuworker.parallel.linear_part import LinearPart
from tidemill_gpuworker.parallel.shard import Section
from tidemill_gpuworker.quantization.cutting import cut_weight
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

    Its output is theirs side by side; ``rows`` are their output features.  Raises as ``load_part``
    does.
    """
    outputs = tuple((Section(count),) for count in rows)
    part = LinearPart(tuple(names), outputs, Section(in_features))
    return load_part(checkpoint, part, with_bias=with_bias)


def load_part(checkpoint: Checkpoint, part: LinearPart, *, with_bias: bool) -> Linear:
    """Return a part of some layers as one layer.

    Where it is a part of the inputs the first rank has the bias.  Raises as ``Checkpoint.stacked``
    does, as formats of quantised layers do, and as ``cut_weight`` does.
    """
    linear = _load(_Layers(checkpoint, part, with_bias))
    if checkpoint.wrap_linear is None:
        return linear
    return checkpoint.wrap_linear(part, linear)


def _load(layers: "_Layers") -> Linear:
    scheme = layers.checkpoint.quantization
    if isinstance(scheme, QuantScheme):
        return layers.load_stored(scheme)
    if scheme is not None and all(scheme.takes(name) for name in layers.part.names):
        return layers.load_and_quantise(scheme)
    return layers.load_plain()


@dataclass(frozen=True, slots=True)
class _Layers:
    checkpoint: Checkpoint
    part: LinearPart
    with_bias: bool

    def load_plain(self) -> Linear:
        return make_linear(self._plain_weight(), self._bias())

    def load_and_quantise(self, scheme: OnTheFly) -> Linear:
        if self.part.inputs.shard.is_whole:
            weight = scheme.quantise(self._plain_weight())
        else:
            # Its scales are of all inputs, as they are in one process.
            weight = cut_weight(scheme.quantise(self._whole_weight()), self.part)
        return self._finish(weight, was_plain=True)

    def load_stored(self, scheme: QuantScheme) -> Linear:
        layers = [_Layers(self.checkpoint, part, self.with_bias) for part in self.part.split()]
        weights = [layer._read(scheme) for layer in layers]
        present = [weight for weight in weights if weight is not None]
        if not present:
            return self.load_plain()
        whole = stack(present) if len(present) == len(weights) else None
        if whole is not None:
            return self._quantized(whole)
        return SideBySide(
            [
                layer.load_plain() if weight is None else layer._quantized(weight)
                for layer, weight in zip(layers, weights, strict=True)
            ]
        )

    def _read(self, scheme: QuantScheme) -> QuantizedWeight | None:
        (name,), (rows,) = self.part.names, self.part.whole_rows
        found = scheme.format_of(name)
        layer = StoredLayer(self.checkpoint, name, rows, self.part.inputs.whole_size)
        # Writers leave some layers plain that their lists do not tell of.
        if found is None or layer.is_plain():
            return None
        return cut_weight(found.read(layer), self.part)

    def _quantized(self, weight: QuantizedWeight) -> Linear:
        if not self.with_bias:
            self._drop_zero_biases()
        return self._finish(weight, was_plain=False)

    def _finish(self, weight: QuantizedWeight, *, was_plain: bool) -> Linear:
        layer = QuantizedLinear(weight, self._bias(), self.checkpoint.device)
        num_weights = sum(self.part.rows) * self.part.inputs.size
        self.checkpoint.count_quantized(num_weights, layer.num_bytes, was_plain=was_plain)
        return layer

    def _drop_zero_biases(self) -> None:
        """Take the biases of zeros that writers of GPTQ add to layers that have none."""
        for name in self.part.names:
            bias = f"{name}.bias"
            if self.checkpoint.stored_dtype(bias) is not None:
                self.checkpoint.take_zeros(bias)

    def _plain_weight(self) -> torch.Tensor:
        part = self.part
        if part.is_whole:
            return self.checkpoint.stacked(self._tensors("weight"), part.rows, part.inputs.size)
        if part.inputs.shard.is_whole:
            return self._outputs("weight", part.inputs.size)
        weights = [
            self.checkpoint.part(name, 1, [part.inputs], rows)
            for name, rows in zip(self._tensors("weight"), part.rows, strict=True)
        ]
        return torch.cat(weights)

    def _whole_weight(self) -> torch.Tensor:
        rows, inputs = self.part.whole_rows, self.part.inputs
        self.checkpoint.leave(sum(rows) * (inputs.whole_size - inputs.size))
        return self.checkpoint.stacked(self._tensors("weight"), rows, inputs.whole_size)

    def _bias(self) -> torch.Tensor | None:
        if not self.with_bias:
            return None
        if not self.part.is_whole and self.part.inputs.shard.is_whole:
            return self._outputs("bias")
        bias = self.checkpoint.stacked(self._tensors("bias"), self.part.rows)
        # Added once, by one rank.
        return None if self.part.inputs.shard.index else bias

    def _outputs(self, kind: str, *rest: int) -> torch.Tensor:
        pairs = zip(self._tensors(kind), self.part.outputs, strict=True)
        return torch.cat(
            [self.checkpoint.part(name, 0, sections, *rest) for name, sections in pairs]
        )

    def _tensors(self, kind: str) -> list[str]:
        return [f"{name}.{kind}" for name in self.part.names]
