"""From what an answer must look like to the grammar that llguidance compiles.

Needs llguidance; the same in workers, which enforce the grammar, and in those that check a request
before it is queued.
"""

import json
import re
from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.structured import StructuredOutput

#: Between two tokens of JSON; bounded, because a model may go on with spaces for ever.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
_MAX_SHOWN_CHARS = 300
_MAX_CHECKED = 256

#: How llguidance names keywords it cannot enforce.
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*?\])")
_UNKNOWN_FORMAT = re.compile(r"Unknown format: (\S+)")


def limits() -> LLParserLimits:
    """Bounds on what compiling a grammar and one mask may cost: about 20 ms and 15 ms of work."""
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
    """Raise ``InvalidRequest``, naming the keyword, if no worker would enforce this."""
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
    reason = " ".join(complaint.split())[:_MAX_SHOWN_CHARS]
    return InvalidRequest(f"{field}: {reason}", field=field, fix="Correct it, or make it simpler.")


@lru_cache(_MAX_CHECKED)
def _complaint(structured: StructuredOutput) -> str:
    return LLMatcher.validate_grammar(grammar_of(structured), limits=limits())


def _schema_grammar(structured: StructuredOutput) -> str:
    schema = (structured.json_schema or "").strip()
    if schema == "false":
        raise refusal(structured, "no value satisfies it")
    try:
        return _json_grammar("{}" if schema == "true" else schema, is_strict=structured.strict)
    except ValueError as error:
        raise refusal(structured, str(error)) from error


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
