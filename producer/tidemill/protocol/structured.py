"""What the text of an answer must look like: a schema, a pattern, some choices or a grammar."""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tidemill.protocol.values import AnyText, Text
from tidemill.protocol.wire_model import WireModel

MAX_SCHEMA_BYTES = 1 << 18
MAX_SCHEMA_NESTING = 64
MAX_REGEX_BYTES = 1 << 14
MAX_GRAMMAR_BYTES = 1 << 17
MAX_CHOICES = 1024
MAX_CHOICE_CHARS = 4096

#: The names of the constraints, of which a request has exactly one.
CONSTRAINTS = ("json_schema", "json_object", "regex", "choice", "grammar")


def _as_text(schema: object) -> object:
    if not isinstance(schema, Mapping | bool):
        return schema
    try:
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    except RecursionError as error:
        raise ValueError(f"it nests deeper than {MAX_SCHEMA_NESTING} levels") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"it is not JSON: {error}") from error


def _check_schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"it nests deeper than {MAX_SCHEMA_NESTING} levels") from error
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise ValueError(f"a schema is an object or a boolean, not {type(schema).__name__}")
    if nesting(schema) > MAX_SCHEMA_NESTING:
        raise ValueError(f"it nests deeper than {MAX_SCHEMA_NESTING} levels")
    return text


def nesting(value: Any) -> int:
    """Return how many lists and objects of parsed JSON are within each other, at most."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [child for item in level for child in _children(item)]
    return depth


def _children(value: Any) -> list[Any]:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in inside if isinstance(child, dict | list)]


def _at_most(limit: int) -> Callable[[str], str]:
    def check(text: str) -> str:
        size = len(text.encode())
        if size > limit:
            raise ValueError(f"it has {size} bytes, the limit is {limit}")
        return text

    return check


SchemaText = Annotated[
    AnyText,
    BeforeValidator(_as_text),
    AfterValidator(_at_most(MAX_SCHEMA_BYTES)),
    AfterValidator(_check_schema),
]
Regex = Annotated[Text, AfterValidator(_at_most(MAX_REGEX_BYTES))]
Grammar = Annotated[Text, AfterValidator(_at_most(MAX_GRAMMAR_BYTES))]
Choice = Annotated[Text, Field(max_length=MAX_CHOICE_CHARS)]


class StructuredOutput(WireModel):
    """What an answer must look like: exactly one of the constraints.

    ``json_schema`` is JSON text (an object is turned into it; its properties come in its order),
    ``json_object`` any JSON object, ``regex`` a pattern for the whole answer in the syntax of
    Rust's ``regex`` crate, ``choice`` texts of which the answer is one, ``grammar`` EBNF in
    the notation of Lark as llguidance reads it, or in that of GBNF (``root ::= ...``).

    ``strict`` refuses a schema with a keyword that cannot be enforced; otherwise such keywords are
    left out, and the answer may break them.
    """

    json_schema: SchemaText | None = None
    json_object: bool = False
    regex: Regex | None = None
    choice: tuple[Choice, ...] | None = Field(default=None, min_length=1, max_length=MAX_CHOICES)
    grammar: Grammar | None = None
    strict: bool = True

    @model_validator(mode="after")
    def _one_constraint(self) -> "StructuredOutput":
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            named = f", not {' and '.join(given)}" if given else ""
            raise ValueError(f"exactly one of {', '.join(CONSTRAINTS)} is needed{named}")
        return self

    @property
    def constraint(self) -> str:
        """The name of the one constraint."""
        return next(name for name in CONSTRAINTS if getattr(self, name) not in (None, False))
