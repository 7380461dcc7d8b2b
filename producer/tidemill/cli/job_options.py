"""Options of the command line that ``submit`` and ``bulk run`` share."""

from typing import Annotated

import typer

from tidemill.protocol.errors import ConfigError

Deadline = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="It expires if it has not ended then.")
]

MaxQueue = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="It expires if no worker has it then.")
]

StallTimeout = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="It expires if no token comes for so long.")
]

MaxRetries = Annotated[
    int | None, typer.Option(help="Tries after errors that may pass. Default: 3.")
]

Batch = Annotated[
    str | None, typer.Option(metavar="NAME", help="Group of jobs; see `tidemill cancel`.")
]

CallbackUrl = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Gets a signed webhook at the end; see `tidemill webhooks`."),
]

Metadata = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="Kept with it; repeatable.")
]

Lora = Annotated[
    str | None, typer.Option(metavar="NAME", help="Adapter of the model; see `tidemill lora`.")
]

PrefixId = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Name of what the prompt begins with: jobs of one name run together."
    ),
]


def parse_metadata(texts: list[str] | None) -> dict[str, str]:
    """Return the pairs of ``KEY=VALUE``; raises ``ConfigError``."""
    pairs = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--metadata {text!r} is not KEY=VALUE")
        pairs[name] = value
    return pairs
