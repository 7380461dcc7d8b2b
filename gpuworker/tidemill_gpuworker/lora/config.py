"""Where a worker finds adapters, and how many it keeps."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from tidemill.protocol.errors import ConfigError

DEFAULT_MAX_LORAS = 8
DEFAULT_MAX_RANK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """The adapters of one worker.

    ``modules`` are named directories; every directory in ``directory`` is an adapter of its own
    name, and may come and go while the worker runs.  The ``max_loras`` used last stay loaded.
    Raises ``ConfigError``.
    """

    modules: tuple[tuple[str, Path], ...] = ()
    directory: Path | None = None
    max_loras: int = DEFAULT_MAX_LORAS
    max_rank: int = DEFAULT_MAX_RANK

    def __post_init__(self) -> None:
        names = [name for name, _ in self.modules]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                f"lora_modules: {twice[0]!r} is given twice", fix="Give each adapter its own name."
            )
        if self.directory is not None and not self.directory.is_dir():
            raise ConfigError(
                f"lora_dir: {self.directory} is no directory", fix="Create it, or leave it out."
            )


def parse_module(text: str) -> tuple[str, Path]:
    """Read ``name=path``; raises ``ArgumentTypeError``."""
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise argparse.ArgumentTypeError(f"{text} is not name=path")
    return name, Path(path)
