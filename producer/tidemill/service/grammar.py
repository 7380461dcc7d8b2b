"""From what an answer must look like to the grammar that llguidance compiles.

Needs llguidance; the same in workers, which enforce the grammar, and in those that check a request
before it is queued.
"""

import json
import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.structured import StructuredOutput

#: Between two tokens of JSON; bounded, because a model may go on with spaces for ever.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
_MAX_SHOWN_CHARS = 300
_MAX_CHECKED = 256

#: Longest schema or grammar that is examined before it is queued, which takes up to 0.3 s then and
#: grows with the square; workers examine all.
_MAX_EXAMINED_CHARS = 1 << 15

#: Largest ``multipleOf``, without the zeros at its end, which cost nothing: the automaton has
#: about so many states, and 0.7 s go into 99,999 of them.
MAX_MULTIPLE = 100_000
#: Keywords whose values are no schemas.
_PLAIN_VALUES = frozenset({"const", "enum", "default", "examples"})

#: How llguidance names keywords it cannot enforce.
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*?\])")
_UNKNOWN_FORMAT = re.compile(r"Unknown format: (\S+)")
_NOT_VERBOSE = "\n<non-verbose/>"
#: What it says of a pattern, rule or reference that matches nothing at all.
_NOTHING_FITS = "NoExtensionBias"


def limits() -> LLParserLimits:
    """Bounds on a grammar and on one mask.

    They are llguidance's own and leave out much: ``multipleOf``, long lists of properties.  The
    first mask of a pattern may take a second within them; workers bound the whole by a trial.
    """
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def grammar_of(structured: StructuredOutput) -> str:
    """Return the grammar in llguidance's notation; raises ``InvalidRequest``."""
    match structured.constraint:
        case "json_schema":
            return _schema_grammar(structured)
        case "json_object":
            return _json_grammar('{"type":"object"}', is_strict=True)
        case "regex":
            return LLMatcher.grammar_from_regex(structured.regex or "")
        case "choice":
            texts = [json.dumps(text, ensure_ascii=False) for text in structured.choice or ()]
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
        case _:
            return LLMatcher.grammar_from_lark(_lark(structured))


def check(structured: StructuredOutput) -> None:
    """Raise ``InvalidRequest``, naming the keyword, if no worker would enforce this.

    Long schemas and grammars are left to the worker.
    """
    if len(structured.json_schema or structured.grammar or "") > _MAX_EXAMINED_CHARS:
        return
    complaint = _complaint(structured)
    if complaint:
        raise refusal(structured, complaint)


def refusal(structured: StructuredOutput, complaint: str) -> InvalidRequest:
    """Return the error for a constraint of which llguidance complains."""
    field = f"structured.{structured.constraint}"
    keywords = _unsupported_keywords(complaint)
    if keywords:
        return InvalidRequest(
            f"{field}: {', '.join(map(repr, keywords))} cannot be enforced",
            field=field,
            fix="Leave it out, or send strict=false: then the answer may break it.",
        )
    if _NOTHING_FITS in complaint:
        return InvalidRequest(
            f"{field}: no finite answer satisfies it",
            field=field,
            fix="Look for a rule or a $ref that leads to itself alone, and for an empty set.",
        )
    reason = " ".join(complaint.removesuffix(_NOT_VERBOSE).split())[:_MAX_SHOWN_CHARS]
    return InvalidRequest(f"{field}: {reason}", field=field, fix="Correct it, or make it simpler.")


@lru_cache(_MAX_CHECKED)
def _complaint(structured: StructuredOutput) -> str:
    return LLMatcher.validate_grammar(grammar_of(structured), limits=limits())


def _schema_grammar(structured: StructuredOutput) -> str:
    schema = (structured.json_schema or "").strip()
    if schema == "false":
        raise refusal(structured, "no value satisfies it")
    _check_multiples(json.loads(schema, parse_float=Decimal))
    try:
        return _json_grammar("{}" if schema == "true" else schema, is_strict=structured.strict)
    except ValueError as error:
        raise refusal(structured, str(error)) from error


def _check_multiples(schema: Any) -> None:
    """Raise ``InvalidRequest`` if a ``multipleOf`` is larger than llguidance compiles quickly."""
    level = [schema]
    while level:
        item = level.pop()
        if isinstance(item, dict):
            _check_multiple(item.get("multipleOf"))
            level += [value for name, value in item.items() if name not in _PLAIN_VALUES]
        elif isinstance(item, list):
            level += item


def _check_multiple(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        return
    digits = "".join(map(str, Decimal(value).as_tuple().digits)).rstrip("0")
    if len(digits) > len(str(MAX_MULTIPLE)) or int(digits or 0) > MAX_MULTIPLE:
        raise InvalidRequest(
            f"structured.json_schema: multipleOf: {str(value)[:40]} takes too long to compile",
            field="structured.json_schema",
            fix=f"Its digits, without zeros at the end, may come to {MAX_MULTIPLE:,} at most.",
        )


def _json_grammar(schema: str, *, is_strict: bool) -> str:
    # As overrides, because a schema may carry options of its own under "x-guidance".
    return LLMatcher.grammar_from_json_schema(
        schema,
        overrides={
            "whitespace_flexible": True,
            "whitespace_pattern": _WHITESPACE,
            "lenient": not is_strict,
            "coerce_one_of": not is_strict,
        },
    )


def _lark(structured: StructuredOutput) -> str:
    try:
        return str(any_to_lark(structured.grammar or ""))
    except Exception as error:  # the converter's own errors share no base
        raise refusal(structured, str(error) or type(error).__name__) from error


def _unsupported_keywords(complaint: str) -> list[str]:
    if found := _UNIMPLEMENTED.search(complaint):
        return [str(keyword) for keyword in json.loads(found.group(1))]
    if found := _UNKNOWN_FORMAT.search(complaint):
        return [f"format: {found.group(1)}"]
    return ["oneOf"] if complaint.startswith("oneOf constraints") else []
