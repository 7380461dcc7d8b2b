"""How well the guesses come true."""

from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class SpeculationFigures:
    """Counts since the start; ``accepted_per_position`` is by place in the draft."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def copy(self) -> "SpeculationFigures":
        """Return the figures as they are now."""
        return replace(self, accepted_per_position=list(self.accepted_per_position))

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Take in one draft."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        missing = num_accepted - len(self.accepted_per_position)
        self.accepted_per_position += [0] * missing
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1
