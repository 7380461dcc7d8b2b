"""What ``--model`` may name: a directory, a GGUF file, or a model of a hub."""

import re
from dataclasses import dataclass
from pathlib import Path

GGUF_SUFFIX = ".gguf"
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w./-]*))?")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository, *organisation/name*, and the branch, tag or commit; None for the default."""

    repository: str
    revision: str | None = None


def parse_hub_name(model: str) -> HubName | None:
    """Return the name on a hub that ``model`` is; None if something of that path is here."""
    found = _HUB_NAME.fullmatch(model)
    if found is None or found[1].endswith(GGUF_SUFFIX) or Path(model).exists():
        return None
    return HubName(found[1], found[2])


def default_served_name(model: str) -> str:
    """Return the name that jobs ask for unless another is given."""
    hub = parse_hub_name(model)
    if hub is not None:
        return hub.repository
    path = Path(model).expanduser().resolve()
    return path.stem if path.suffix == GGUF_SUFFIX else path.name
