"""How OpenAI's and vLLM's clients ask for the form of an answer."""

from collections.abc import Mapping
from typing import Any

from tidemill.protocol.errors import InvalidRequest


def structured_fields(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields of ``StructuredOutput`` that a request body asks for; None for free text.

    ``response_format`` is OpenAI's, ``structured_outputs`` vLLM's.  A schema is strict unless the
    request says that it is not.  Raises ``InvalidRequest`` naming the field that is wrong.
    """
    ours, wanted = body.get("structured_outputs"), body.get("response_format")
    if ours is not None and not isinstance(ours, Mapping):
        raise _wrong("structured_outputs", "it is not an object")
    form = _of_response_format(wanted) if wanted is not None else None
    if ours is not None and form is not None:
        raise _wrong("response_format", "structured_outputs says the form already")
    return form if ours is None else {str(name): value for name, value in ours.items()}


def _of_response_format(wanted: object) -> dict[str, Any] | None:
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind == "structural_tag":
        raise _wrong(
            "response_format.type",
            "structural_tag is not supported",
            "Use json_schema for the whole answer, or tools for parts of it.",
        )
    if not isinstance(wanted, Mapping) or kind not in ("text", "json_object", "json_schema"):
        raise _wrong("response_format.type", "it is none of text, json_object and json_schema")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    named = wanted.get("json_schema")
    if not isinstance(named, Mapping) or named.get("schema") is None:
        raise _wrong("response_format.json_schema.schema", "it is missing")
    return {"json_schema": named["schema"], "strict": named.get("strict") is not False}


def _wrong(field: str, reason: str, fix: str = "") -> InvalidRequest:
    return InvalidRequest(f"{field}: {reason}", field=field, fix=fix)
