"""Whether a batch can be worked off: one pass over its input, which tells all that is wrong."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import BinaryIO

from tidemill.batches.lines import RawLine, RequestLine, parse_line, read_lines
from tidemill.protocol.batches import MAX_LINES, LineError

#: Bounds of a part: the lines whose output is written at once.
PART_LINES = 256
PART_BYTES = 2 << 20
#: Errors that are told one by one.
MAX_ERRORS = 500


@dataclass
class Survey:
    """What an input holds: requests, where its parts begin, the one model it names if it is one.

    ``layout`` has the byte and the line at which each part begins.
    """

    total: int = 0
    layout: list[tuple[int, int]] = field(default_factory=list)
    model: str = ""
    errors: list[LineError] = field(default_factory=list)


def survey(file: BinaryIO, endpoint: str) -> Survey:
    """Read a whole input, line by line."""
    return _Surveyor(endpoint).run(file)


class _Surveyor:
    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._found = Survey()
        self._num_errors = 0
        self._models: set[str] = set()
        #: Digests of the ids: 50,000 ids of any length take a few MB.
        self._seen: dict[bytes, int] = {}
        self._part_lines = self._part_bytes = 0

    def run(self, file: BinaryIO) -> Survey:
        for line in read_lines(file):
            if line.is_blank:
                continue
            if self._found.total == MAX_LINES:
                told = f"The file has more than {MAX_LINES} requests."
                self._note(LineError("too_many_tasks", told, line.number))
                break
            self._take(line)
        return self._finish()

    def _take(self, line: RawLine) -> None:
        self._found.total += 1
        self._lay_out(line)
        parsed = parse_line(line, self._endpoint)
        for error in self._check(parsed) if isinstance(parsed, RequestLine) else parsed:
            self._note(error)

    def _check(self, line: RequestLine) -> Iterator[LineError]:
        digest = blake2b(line.custom_id.encode(), digest_size=16).digest()
        first = self._seen.setdefault(digest, line.number)
        if first != line.number:
            told = f"custom_id {line.custom_id[:80]!r} is that of line {first} too."
            yield LineError("duplicate_custom_id", told, line.number, "custom_id")
        model = line.body.get("model")
        if isinstance(model, str):
            # Half of a surrogate pair is no fault of the file, but nothing could keep it.
            self._models.add(model[:256].encode("utf-8", "replace").decode())

    def _lay_out(self, line: RawLine) -> None:
        is_full = self._part_lines >= PART_LINES
        if not self._found.layout or is_full or self._part_bytes + line.num_bytes > PART_BYTES:
            self._found.layout.append((line.offset, line.number))
            self._part_lines = self._part_bytes = 0
        self._part_lines += 1
        self._part_bytes += line.num_bytes

    def _note(self, error: LineError) -> None:
        self._num_errors += 1
        if self._num_errors <= MAX_ERRORS:
            self._found.errors.append(error)

    def _finish(self) -> Survey:
        if not self._found.total:
            self._note(LineError("empty_file", "The file has no requests."))
        if (left_out := self._num_errors - MAX_ERRORS) > 0:
            told = f"{left_out} more errors are not listed."
            self._found.errors.append(LineError("too_many_errors", told))
        if len(self._models) == 1:
            [self._found.model] = self._models
        return self._found


def read_part(
    file: BinaryIO, endpoint: str, layout: tuple[tuple[int, int], ...], number: int
) -> list[RequestLine]:
    """Return the requests of one part of an input that was found to be valid."""
    offset, first = layout[number]
    end = layout[number + 1][1] if number + 1 < len(layout) else None
    found: list[RequestLine] = []
    for line in read_lines(file, offset=offset, number=first):
        if line.number == end:
            break
        if not line.is_blank and isinstance(parsed := parse_line(line, endpoint), RequestLine):
            found.append(parsed)
    return found
