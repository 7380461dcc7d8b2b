"""Which implementation runs a model: our own layers, or those of `transformers`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from tidemill_gpuworker.engine.inputs import StepInputs
from tidemill_gpuworker.loading.config_fields import ConfigFields, read_config
from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.loading.model_config import ModelConfig, load_model_config
from tidemill_gpuworker.loading.model_families import FAMILIES
from tidemill_gpuworker.loading.model_task import architecture_of
from tidemill_gpuworker.memory.kv_cache import KVCache
from tidemill_gpuworker.models.chunks import check_chunks
from tidemill_gpuworker.models.decoder import Decoder
from tidemill_gpuworker.options.worker_config import ModelImpl
from tidemill_gpuworker.parallel.collectives import NO_COLLECTIVES, Collectives
from tidemill_gpuworker.parallel.shard import EVERYTHING, Place
from tidemill_gpuworker.parallel.split_config import check_split, layers_of, split_config
from tidemill_kernels import AttentionBackend


class Model(Protocol):
    """A loaded decoder: how a step is computed on one kind of device."""

    def __call__(
        self, inputs: StepInputs, cache: KVCache, backend: AttentionBackend
    ) -> torch.Tensor:
        """Return the last hidden states [tokens, hidden]; mutates the cache."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [rows, vocabulary] of some rows of the hidden states."""
        ...


class Part(Model, Protocol):
    """What one rank holds of a model, perhaps all of it."""

    @property
    def head_is_split(self) -> bool:
        """Whether the other ranks of the first stage take part in ``logits``."""
        ...


#: Makes a KV cache of so many blocks of a dtype, on all ranks.
MakeCache = Callable[[int, torch.dtype], KVCache]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is to be served.

    Attributes:
        max_model_len: the longest context.
        num_positions: the longest sequence that there is room for.
        place: the part of the model to load.
        ranks: those that hold the other parts.
    """

    dtype: torch.dtype
    device: torch.device
    backend: AttentionBackend
    block_size: int
    max_model_len: int
    num_positions: int
    place: Place = EVERYTHING
    ranks: Collectives = NO_COLLECTIVES


class ModelSource(Protocol):
    """A model directory that has been looked into, with no weights loaded yet."""

    @property
    def model_config(self) -> ModelConfig:
        """The model's shape."""
        ...

    @property
    def impl(self) -> Literal["native", "transformers"]:
        """Whose layers compute it."""
        ...

    def split(self, place: Place) -> ModelConfig:
        """Return the shape of a part of the model.

        Raises ``ConfigError`` or ``UnsupportedModel`` if there is no such part.
        """
        ...

    def load(self, checkpoint: Checkpoint, options: LoadOptions) -> Part:
        """Return the model, or the part wanted; raises ``ModelError`` if its weights do not fit."""
        ...

    def check(self, model: Model, options: LoadOptions, make_cache: MakeCache) -> None:
        """Raise ``ModelError`` if the loaded model, all ranks together, computes nonsense."""
        ...


class NativeSource:
    """A model of a native family; raises as ``load_model_config`` does."""

    def __init__(self, model_dir: Path) -> None:
        self.model_config = load_model_config(model_dir)

    @property
    def impl(self) -> Literal["native"]:
        """Our own layers."""
        return "native"

    def split(self, place: Place) -> ModelConfig:
        """Return the shape of a part; raises as ``check_split`` does."""
        check_split(self.model_config, place.tensor.count, place.stage.count)
        return split_config(self.model_config, place)

    def load(self, checkpoint: Checkpoint, options: LoadOptions) -> Decoder:
        """Return our own decoder with the weights of ``checkpoint``, or the part wanted."""
        check_chunks(self.model_config.attention_chunk, options.block_size, options.max_model_len)
        if prefix := FAMILIES[self.model_config.architecture].prefix:
            checkpoint.enter(prefix)
        place = options.place
        num_layers = self.model_config.num_layers
        checkpoint.skip_layers({*range(num_layers)} - {*layers_of(num_layers, place.stage)})
        model = Decoder(
            split_config(self.model_config, place),
            checkpoint,
            max_model_len=options.max_model_len,
            num_positions=options.num_positions,
            place=place,
            ranks=options.ranks,
        )
        checkpoint.check_layers_taken()
        return model

    def check(self, model: Model, options: LoadOptions, make_cache: MakeCache) -> None:
        """Do nothing: the tests know all native families."""


def choose_model(model_dir: Path, impl: ModelImpl = "auto") -> ModelSource:
    """Look into a model directory; *auto* takes our own implementation where there is one.

    Raises ``ModelError`` if it cannot be served; the subclass says why.
    """
    if impl == "auto":
        config = ConfigFields(read_config(model_dir), model_dir / "config.json")
        # Anything but a list of names is damage, which this raises.
        config.names("architectures")
        is_native = architecture_of(config.values) in FAMILIES
        impl = "native" if is_native else "transformers"
    if impl == "native":
        return NativeSource(model_dir)
    # Imported here: transformers takes seconds, which our own models need not wait for.
    from tidemill_gpuworker.transformers_backend.source import TransformersSource

    return TransformersSource(model_dir)
