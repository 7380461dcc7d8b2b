"""Which part of a model one of several processes holds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """The part number ``index`` of ``count`` equal ones."""

    index: int = 0
    count: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether there is one part only."""
        return self.count == 1


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Section:
    """``size`` rows of what is ``shard.count`` times as long."""

    size: int
    shard: Shard = WHOLE

    @property
    def whole_size(self) -> int:
        """Rows of all parts together."""
        return self.size * self.shard.count

    @property
    def start(self) -> int:
        """The first row of this part."""
        return self.size * self.shard.index


@dataclass(frozen=True, slots=True)
class Place:
    """The part of a model that one rank computes.

    Attributes:
        tensor: its part of the heads and inner features of each layer.
        stage: its part of the layers.
    """

    tensor: Shard = WHOLE
    stage: Shard = WHOLE

    @property
    def is_whole(self) -> bool:
        """Whether one process holds the model."""
        return self.tensor.is_whole and self.stage.is_whole

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which samples."""
        return not self.tensor.index and not self.stage.index


EVERYTHING = Place()


def place_of(rank: int, tensor_size: int, num_stages: int) -> Place:
    """Return the place of a rank: those of one stage have neighbouring numbers."""
    stage, index = divmod(rank, tensor_size)
    return Place(Shard(index, tensor_size), Shard(stage, num_stages))
