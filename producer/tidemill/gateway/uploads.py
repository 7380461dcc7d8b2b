"""The form of an uploaded file, read as it comes: nothing of it is whole in memory."""

import json
from typing import Any

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from tidemill.protocol.errors import InvalidRequest

#: The file and all other fields.
MAX_PARTS = 1000
#: Of all fields but the file, and of what stands above fields and file.
MAX_FIELD_BYTES = 64 * 1024


class UploadForm:
    """Takes a ``multipart/form-data`` body piece by piece and gives back the pieces of its file.

    ``fields`` has the other fields by name, of several of one name the last; ``listed`` has all
    of them.  Raises ``InvalidRequest``.
    """

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise _wrong("Content-Type is not multipart/form-data with a boundary")
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._take_name,
                    "on_header_value": self._take_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._take_data,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _wrong(str(error)) from error
        self.fields: dict[str, str] = {}
        self.listed: list[tuple[str, str]] = []
        self.filename = ""
        self.has_file = False
        self._header = (b"", b"")
        self._disposition = b""
        self._name, self._value = "", bytearray()
        self._is_file = self._is_whole = False
        self._pieces: list[bytes] = []
        self._num_field_bytes = self._num_parts = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next piece of the body; returns what it holds of the file."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _wrong(str(error)) from error
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> None:
        """Take the end of the body."""
        if not self._is_whole:
            raise _wrong("it ends too early")
        if not self.has_file:
            raise InvalidRequest("file: it is missing", field="file")

    def nested(self, name: str) -> dict[str, Any] | None:
        """Return a field that is an object: as ``name[key]`` fields, or one of JSON."""
        if name in self.fields:
            try:
                found = json.loads(self.fields[name])
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(f"{name}: it is not JSON", field=name) from error
            return found if isinstance(found, dict) else {}
        start = f"{name}["
        parts = {
            key.removeprefix(start).removesuffix("]"): value
            for key, value in self.fields.items()
            if key.startswith(start)
        }
        return parts or None

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _wrong(f"it has more than {MAX_PARTS} fields")
        self._disposition, self._header = b"", (b"", b"")
        self._name, self._value, self._is_file = "", bytearray(), False

    def _take_name(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._header = (self._header[0] + data[start:end], self._header[1])

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._header = (self._header[0], self._header[1] + data[start:end])

    def _end_header(self) -> None:
        if self._header[0].lower() == b"content-disposition":
            self._disposition = self._header[1]
        self._header = (b"", b"")

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == "file"
        if self._is_file:
            if self.has_file:
                raise InvalidRequest("file: there are two", field="file")
            self.has_file = True
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._pieces.append(data[start:end])
            return
        self._count(end - start)
        self._value += data[start:end]

    def _count(self, num_bytes: int) -> None:
        self._num_field_bytes += num_bytes
        if self._num_field_bytes > MAX_FIELD_BYTES:
            raise _wrong(
                f"its fields and their headers have more than {MAX_FIELD_BYTES} bytes, those of"
                " the file not counted"
            )

    def _end_part(self) -> None:
        if not self._is_file:
            value = self.fields[self._name] = self._value.decode("utf-8", "replace")
            self.listed.append((self._name, value))

    def _end(self) -> None:
        self._is_whole = True


def _wrong(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the form cannot be read: {reason}", field="file")
