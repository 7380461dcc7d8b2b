"""The other ranks of a model, as the rank that leads them sees them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from tidemill_gpuworker.engine.inputs import StepInputs
from tidemill_gpuworker.lora.layers import HeldAdapter, LoadedAdapter, Spans
from tidemill_gpuworker.memory.block_copies import BlockCopies
from tidemill_gpuworker.parallel.collectives import NO_COLLECTIVES, Collectives
from tidemill_gpuworker.parallel.shard import EVERYTHING, Place


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """What a rank must know to load its part of a model."""

    model_dir: Path
    impl: str
    quantization: str | None
    is_adaptable: bool
    dtype: str
    block_size: int
    max_model_len: int
    num_positions: int


class Followers(Protocol):
    """Told of all that the leader does with model and cache, so that they do the same.

    Each method raises ``EngineFailed`` once a rank is gone.
    """

    @property
    def place(self) -> Place:
        """The leader's part of the model."""
        ...

    @property
    def collectives(self) -> Collectives:
        """What the leader computes together with them; to be asked for after ``load``."""
        ...

    def load(self, order: LoadOrder) -> None:
        """Let them load their parts, while the leader loads its own."""
        ...

    def confirm(self) -> None:
        """Wait until the last order is carried out."""
        ...

    def make_cache(self, num_blocks: int, num_slots: int, dtype: torch.dtype) -> None:
        """Let them make KV pools of so many blocks, and CPU tiers of so many slots."""
        ...

    def copy(self, copies: BlockCopies) -> None:
        """Let them copy blocks."""
        ...

    def load_adapter(self, adapter: LoadedAdapter, held: HeldAdapter) -> None:
        """Let them load their parts of an adapter until the leader's is gone; any thread may."""
        ...

    def adapt(self, spans: Spans) -> None:
        """Let adapters change these rows of the next step."""
        ...

    def begin_step(self, inputs: StepInputs) -> None:
        """Let them run a step, together with the leader."""
        ...

    def begin_logits(self, hidden: torch.Tensor) -> None:
        """Let the first stage compute logits of these rows, together with the leader."""
        ...

    def check(self) -> None:
        """Raise if a rank is gone: what was computed with it may be anything."""
        ...

    def failed(self, error: Exception) -> Exception:
        """Note that the leader left a step unfinished, after which they can be of no use."""
        ...


class NoFollowers:
    """A model in one process."""

    place = EVERYTHING
    collectives: Collectives = NO_COLLECTIVES

    def load(self, order: LoadOrder) -> None:
        """Do nothing."""

    def confirm(self) -> None:
        """Do nothing."""

    def make_cache(self, num_blocks: int, num_slots: int, dtype: torch.dtype) -> None:
        """Do nothing."""

    def copy(self, copies: BlockCopies) -> None:
        """Do nothing."""

    def load_adapter(self, adapter: LoadedAdapter, held: HeldAdapter) -> None:
        """Do nothing."""

    def adapt(self, spans: Spans) -> None:
        """Do nothing."""

    def begin_step(self, inputs: StepInputs) -> None:
        """Do nothing."""

    def begin_logits(self, hidden: torch.Tensor) -> None:
        """Do nothing."""

    def check(self) -> None:
        """Do nothing."""

    def failed(self, error: Exception) -> Exception:
        """Return the error: the next step may do better."""
        return error


NO_FOLLOWERS = NoFollowers()
