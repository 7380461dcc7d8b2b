"""The part of linear layers that one rank holds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tidemill_gpuworker.parallel.shard import Section


@dataclass(frozen=True, slots=True)
class LinearPart:
    """Some of the outputs, or some of the inputs, of layers that share their input.

    Attributes:
        names: of the layers, whose outputs are side by side.
        outputs: of each layer, the sections that its output features are made of.
        inputs: the input features.
    """

    names: tuple[str, ...]
    outputs: tuple[tuple[Section, ...], ...]
    inputs: Section

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the layers."""
        sections = [section for sections in self.outputs for section in sections]
        return all(section.shard.is_whole for section in (*sections, self.inputs))

    @property
    def rows(self) -> list[int]:
        """The outputs of each layer that the part has."""
        return [sum(section.size for section in sections) for sections in self.outputs]

    @property
    def whole_rows(self) -> list[int]:
        """The outputs of each layer."""
        return [sum(section.whole_size for section in sections) for sections in self.outputs]

    def split(self) -> Iterator["LinearPart"]:
        """Yield the part of each layer by itself."""
        for name, sections in zip(self.names, self.outputs, strict=True):
            yield LinearPart((name,), (sections,), self.inputs)


def ranges_of(sections: Sequence[Section]) -> list[slice]:
    """Return where the parts of ``sections``, one after another, are in the whole."""
    ranges, start = [], 0
    for section in sections:
        first = start + section.start
        ranges.append(slice(first, first + section.size))
        start += section.whole_size
    return ranges
