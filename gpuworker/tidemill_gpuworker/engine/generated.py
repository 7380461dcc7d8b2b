"""What attempts of a job have generated."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Generated:
    """All tokens of one choice of a job so far, and the length of the text told with them."""

    ids: list[int]
    num_chars: int
