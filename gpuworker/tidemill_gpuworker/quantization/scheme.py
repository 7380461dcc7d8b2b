"""Which layers of a model are quantised, and how they are stored."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from tidemill_gpuworker.quantization.stored_layer import Format

#: Whether something applies to the layer of that name.
Matcher = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """How the linear layers of a checkpoint are quantised.

    Attributes:
        method: the name that config.json gives it.
        groups: formats and the layers that are stored in them; the first that matches counts.
        ignored: layers that are stored as plain floats.
    """

    method: str
    groups: tuple[tuple[Matcher, Format], ...]
    ignored: tuple[Matcher, ...] = field(default=())

    def format_of(self, name: str) -> Format | None:
        """Return how the layer of that name is stored, None for plain floats."""
        if any(matches(name) for matches in self.ignored):
            return None
        return next((found for matches, found in self.groups if matches(name)), None)


def any_layer(name: str) -> bool:
    """Match every layer."""
    return True


def part_of_name(part: str) -> Matcher:
    """Return a matcher of names that hold ``part`` between dots, at an end, or all of it.

    So ``lm_head``, ``mlp.gate`` and ``model.layers.0`` match as the libraries that write
    ``modules_to_not_convert`` mean it, and ``layers.1`` does not match ``layers.10``.
    """
    return lambda name: f".{part}." in f".{name}."


def name_or_pattern(text: str) -> Matcher:
    """Return a matcher of one name, or behind ``re:`` of a pattern from the name's start."""
    if text.startswith("re:"):
        pattern = re.compile(text.removeprefix("re:"))
        return lambda name: pattern.match(name) is not None
    return part_of_name(text)
