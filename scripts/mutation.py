"""A bug that the test suite must find: one exact change of one file."""

from dataclasses import dataclass
from pathlib import Path

_HERE = "the mutations in scripts/"


class Outdated(Exception):
    """The text that a mutation changes is not there any more, or not only once."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A bug to plant: ``old`` becomes ``new`` in ``file``; every one of ``tests`` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> str:
        """Plant the bug in the copy of the repository at ``root``; raises ``Outdated``.

        Returns the file's text without it.
        """
        path = root / self.file
        if not path.exists():
            raise Outdated(f"{self.name}: there is no {self.file}; bring {_HERE} up to date")
        text = path.read_text("utf-8")
        path.write_text(self.mutated(text), "utf-8")
        return text

    def mutated(self, text: str) -> str:
        """Return the file's text with the bug; raises ``Outdated``."""
        if (found := text.count(self.old)) != 1:
            raise Outdated(
                f"{self.name}: its text is {found} times in {self.file}, not once;"
                f" bring {_HERE} up to date"
            )
        return text.replace(self.old, self.new)
