"""What an answer must look like, as callers say it."""

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, TypedDict

from pydantic import BaseModel, ValidationError

from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.messages import invalid_request
from tidemill.protocol.structured import StructuredOutput

#: Names that vLLM's clients use for ours.
_ALIASES = {"json": "json_schema"}


class StructuredOptions(TypedDict, total=False):
    """What the answer must look like.

    ``structured`` is a ``StructuredOutput`` or its fields; ``json_schema`` alone is short for the
    most usual one: a schema, or a pydantic model.
    """

    structured: StructuredOutput | Mapping[str, Any] | None
    json_schema: Mapping[str, Any] | str | bool | type[BaseModel] | None


def take_structured(options: dict[str, Any]) -> StructuredOutput | None:
    """Take the options of ``StructuredOptions`` out of ``options``.

    Where llguidance is installed the constraint is compiled, to refuse at once what no worker
    would enforce.  Raises ``InvalidRequest``.
    """
    given, schema = options.pop("structured", None), options.pop("json_schema", None)
    if given is not None and schema is not None:
        raise InvalidRequest(
            "json_schema: the answer has another form already, structured", field="json_schema"
        )
    if schema is not None:
        given = {"json_schema": _schema_of(schema)}
    if given is None:
        return None
    structured = _structured_of(given)
    _check(structured)
    return structured


def _schema_of(schema: object) -> object:
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return schema.model_json_schema()
    return schema


def _structured_of(given: object) -> StructuredOutput:
    if isinstance(given, StructuredOutput):
        return given
    if not isinstance(given, Mapping):
        raise InvalidRequest(
            f"structured: {type(given).__name__} is not StructuredOutput",
            field="structured",
            fix="Give StructuredOutput(...), or its fields as a mapping.",
        )
    try:
        return StructuredOutput.model_validate(
            {_ALIASES.get(str(name), str(name)): value for name, value in given.items()}
        )
    except ValidationError as error:
        told = invalid_request(error)
        field = "structured" if told.field == "request" else f"structured.{told.field}"
        message = told.message.removeprefix(f"{told.field}: ")
        raise InvalidRequest(f"{field}: {message}", field=field) from error


def _check(structured: StructuredOutput) -> None:
    if _has_llguidance():
        # Only now, and only here: most producers neither have nor need it.
        from tidemill.service.grammar import check

        check(structured)


@cache
def _has_llguidance() -> bool:
    return find_spec("llguidance") is not None
