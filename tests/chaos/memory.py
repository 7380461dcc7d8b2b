"""What a producer that was killed finds in its own record when it starts again."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.history import read_events


@dataclass
class Memory:
    """What earlier lives of this producer have recorded, by job number."""

    tried: set[int] = field(default_factory=set)
    accepted: dict[int, str] = field(default_factory=dict)
    cursors: dict[int, tuple[int, str]] = field(default_factory=dict)
    followed: set[int] = field(default_factory=set)
    cancelled: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    swept: set[int] = field(default_factory=set)
    closed: set[int] = field(default_factory=set)

    @classmethod
    def load(cls, directory: Path, index: int) -> "Memory":
        """Read the files of this producer's earlier starts."""
        memory = cls()
        files = sorted(directory.glob(f"producer{index}-*.jsonl"), key=_start_number)
        for path in files:
            for event in read_events(path):
                memory._take(event)
        return memory

    def _take(self, event: dict[str, Any]) -> None:
        number = event.get("n")
        match event["e"]:
            case "submit":
                self.tried.update(event["ns"])
            case "accepted":
                self.accepted[number] = event["job"]
            case "chunk":
                self.cursors[number] = (event["end"], event["id"])
            case "reread":
                self.cursors.pop(number, None)
            case "followed":
                self.followed.add(number)
            case "cancelled":
                self.cancelled.add(number)
            case "conflict":
                self.refused.add(number)
            case "swept":
                self.swept.add(event["sweep"])
            case "closed":
                self.closed.add(number)


def _start_number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])
