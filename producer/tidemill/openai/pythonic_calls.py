"""Calls that are written as a list of Python calls: ``[get_weather(city="Paris")]``."""

import ast
import re

from tidemill.openai.deltas import ToolCall
from tidemill.openai.readings import UNFINISHED, Reading, Tools, done, make_call, malformed

Calls = tuple[ToolCall, ...] | None

#: How a list of calls begins; anything else in brackets is text.
_BEGIN = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_MAY_BEGIN = re.compile(r"\[\s*([A-Za-z_][\w.]*\s*)?$")
#: Whole texts, which are skipped, and brackets; a quote alone opens a text that is not closed.
_BRACKETS = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[\[({\])}'"]""", re.DOTALL)
#: More would only cost time: a call has a few thousand characters at most.
_MAX_CHARS = 1 << 16


def decode_pythonic(text: str, tools: Tools) -> Calls:
    """A whole list of calls with literal arguments."""
    if not text.strip():
        return ()
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return () if _is_cut_off(text) else None
    return _calls_of(tree)


def read_pythonic(text: str, tools: Tools, is_all: bool) -> Reading:
    """A list of calls that nothing announces: it may end at any closing bracket."""
    if not (_BEGIN.match(text) or _MAY_BEGIN.match(text)):
        return malformed(1)
    end = _end_of_list(text[: _MAX_CHARS + 1])
    if end < 0:
        return malformed(1) if len(text) > _MAX_CHARS else UNFINISHED
    calls = decode_pythonic(text[:end], tools)
    if not calls or (tools and any(call.name not in tools for call in calls)):
        return malformed(end)
    return done(calls, end)


def _calls_of(tree: ast.expr) -> Calls:
    if not isinstance(tree, ast.List) or not tree.elts:
        return None
    calls = [_call_of(node) for node in tree.elts]
    found = tuple(call for call in calls if call is not None)
    return found if len(found) == len(calls) else None


def _call_of(node: ast.expr) -> ToolCall | None:
    if not isinstance(node, ast.Call) or node.args:
        return None
    try:
        arguments = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg}
        if len(arguments) < len(node.keywords):
            return None
        return make_call(ast.unparse(node.func), arguments)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return None


def _is_cut_off(text: str) -> bool:
    return _BEGIN.match(text.lstrip()) is not None and _end_of_list(text) < 0


def _end_of_list(text: str) -> int:
    """Return where the bracket that opens the text is closed, -1 if it is not."""
    depth = 0
    for found in _BRACKETS.finditer(text):
        token = found.group()
        if token in ("'", '"'):
            return -1  # a text that is not closed
        if token in ("[", "(", "{"):
            depth += 1
        elif token in ("]", ")", "}"):
            depth -= 1
            if depth <= 0:
                return found.end()
    return -1
