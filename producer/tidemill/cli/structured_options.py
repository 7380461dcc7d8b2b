"""Options of the command line that say what an answer must look like."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tidemill.protocol.errors import ConfigError

JsonSchema = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The answer is JSON that satisfies the schema in this file."),
]

Regex = Annotated[
    str | None, typer.Option(metavar="PATTERN", help="The whole answer matches this pattern.")
]

Choice = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="The answer is one of these; repeatable.")
]

Grammar = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The answer follows the Lark or GBNF grammar in this file."),
]


def structured_fields(
    json_schema: Path | None, regex: str | None, choice: list[str] | None, grammar: Path | None
) -> dict[str, Any] | None:
    """Return the fields of ``StructuredOutput`` that were given, None without any.

    Raises ``ConfigError`` if a file cannot be read.
    """
    given = {
        "json_schema": None if json_schema is None else _read(json_schema, "json-schema"),
        "regex": regex,
        "choice": choice or None,
        "grammar": None if grammar is None else _read(grammar, "grammar"),
    }
    return {name: value for name, value in given.items() if value is not None} or None


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"{option}: the file {str(path)!r} cannot be read: {reason}", fix="Check the path."
        ) from error
