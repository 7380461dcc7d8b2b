"""Lines of a batch's input: read without holding more than one, and checked."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from tidemill.protocol.batches import MAX_LINE_BYTES, LineError

MAX_CUSTOM_ID_CHARS = 512
_SKIP_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line as it stands in the file: its number from 1, the byte at which it begins.

    ``data`` is None if it is longer than ``MAX_LINE_BYTES``.
    """

    number: int
    offset: int
    num_bytes: int
    data: bytes | None

    @property
    def is_blank(self) -> bool:
        """Whether it says nothing."""
        return self.data is not None and not self.data.strip()


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One request of a batch."""

    number: int
    custom_id: str
    body: dict[str, Any]


def read_lines(file: BinaryIO, *, offset: int = 0, number: int = 1) -> Iterator[RawLine]:
    """Yield the lines from ``offset``, where the line of this number begins."""
    file.seek(offset)
    while data := file.readline(MAX_LINE_BYTES + 1):
        num_bytes, is_long = len(data), len(data) > MAX_LINE_BYTES and not data.endswith(b"\n")
        if is_long:
            num_bytes += _skip_rest(file)
        yield RawLine(number, offset, num_bytes, None if is_long else data)
        offset, number = offset + num_bytes, number + 1


def parse_line(line: RawLine, endpoint: str) -> RequestLine | list[LineError]:
    """Return what a line asks of ``endpoint``, or all that is wrong with it."""
    if line.data is None:
        message = f"This line is longer than {MAX_LINE_BYTES} bytes."
        return [LineError("line_too_long", message, line.number)]
    try:
        # A line that begins with a mark of its encoding is one of an editor on Windows.
        fields = json.loads(line.data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return [LineError("invalid_json_line", "This line is not valid JSON.", line.number)]
    if not isinstance(fields, dict):
        return [LineError("invalid_json_line", "This line is no JSON object.", line.number)]
    errors = list(_problems(fields, endpoint, line.number))
    return errors or RequestLine(line.number, fields["custom_id"], fields["body"])


def _problems(fields: dict[str, Any], endpoint: str, number: int) -> Iterator[LineError]:
    def error(code: str, param: str, message: str) -> LineError:
        return LineError(code, message, number, param)

    for name in ("custom_id", "method", "url", "body"):
        if fields.get(name) is None:
            yield error("missing_required_parameter", name, f"Missing required parameter: {name}.")
    custom_id, method, url = (fields.get(name) for name in ("custom_id", "method", "url"))
    if custom_id is not None and not _is_custom_id(custom_id):
        told = f"custom_id must be valid text of 1 to {MAX_CUSTOM_ID_CHARS} characters."
        yield error("invalid_custom_id", "custom_id", told)
    if method not in (None, "POST"):
        yield error("invalid_method", "method", "The method of every line must be POST.")
    if url is not None and url != endpoint:
        yield error("invalid_url", "url", f"The url of every line must be {endpoint}.")
    body = fields.get("body")
    if body is not None and not isinstance(body, dict):
        yield error("invalid_body", "body", "The body must be a JSON object.")


def _is_custom_id(value: object) -> bool:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_CUSTOM_ID_CHARS:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair, which can stand in no output.
        return False
    return True


def _skip_rest(file: BinaryIO) -> int:
    skipped = 0
    while data := file.readline(_SKIP_BYTES):
        skipped += len(data)
        if data.endswith(b"\n"):
            break
    return skipped
