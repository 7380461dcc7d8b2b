"""A model's text, piece by piece, as content, reasoning and tool calls."""

from enum import Enum, auto

from tidemill.openai.deltas import Delta
from tidemill.openai.formats import ReasoningFormat, ToolFormat
from tidemill.openai.readings import Reader, Status, Tools

#: What may stand between two calls that nothing announces.
_BETWEEN_CALLS = " \t\r\n;"


class _Mode(Enum):
    TEXT = auto()
    REASONING = auto()
    CALL = auto()


class OutputParser:
    """Splits one output as it grows; never raises, whatever the model writes.

    What is told does not depend on where the text was cut into pieces.  White space around
    reasoning and calls belongs to neither.  What is no call after all is told as content, markers
    included; a call that the end of the output cut off is dropped.
    """

    def __init__(
        self,
        tools: Tools | None = None,
        *,
        tool_format: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        is_reasoning: bool = False,
    ) -> None:
        self._tools = tools or {}
        self._calls = tool_format if tool_format is not None and tools else ToolFormat()
        self._reasoning = reasoning
        self._mode = _Mode.REASONING if is_reasoning and reasoning else _Mode.TEXT
        self._pending = ""
        self._reader: Reader | None = None
        self._opener = ""
        #: Whether white space at the front of what comes next is left out.
        self._strips = self._mode is _Mode.REASONING
        self._has_content = False

    def feed(self, text: str) -> Delta:
        """Take the next piece; returns what it made certain."""
        self._pending += text
        return self._advance(is_all=False)

    def finish(self) -> Delta:
        """End the output; returns what had been held back."""
        return self._advance(is_all=True)

    def _advance(self, *, is_all: bool) -> Delta:
        told = Delta()
        while True:
            before = (self._mode, self._reader, len(self._pending))
            match self._mode:
                case _Mode.TEXT:
                    told += self._read_text(is_all)
                case _Mode.REASONING:
                    told += self._read_reasoning(is_all)
                case _Mode.CALL:
                    told += self._read_call(is_all)
            if before == (self._mode, self._reader, len(self._pending)):
                return told

    def _read_text(self, is_all: bool) -> Delta:
        if self._may_be_bare_call(is_all):
            return Delta()
        found = self._first_marker()
        if found is not None:
            start, marker = found
            text = self._pending[:start].rstrip()
            self._pending = self._pending[start + len(marker) :]
            told = self._content(text)
            self._open(marker)
            return told
        if is_all:
            return self._content(self._take(len(self._pending)))
        return self._content(self._take(self._certain(self._markers())))

    def _may_be_bare_call(self, is_all: bool) -> bool:
        if self._calls.bare is None or self._has_content:
            return False
        text = self._pending.lstrip(_BETWEEN_CALLS if self._strips else None)
        if not text.startswith(self._calls.bare_start):
            # What has come so far may stand between calls.
            return not text and not is_all
        self._pending = text
        self._mode, self._reader, self._opener = _Mode.CALL, self._calls.bare, ""
        return True

    def _open(self, marker: str) -> None:
        if self._reasoning is not None and marker == self._reasoning.open:
            self._mode, self._strips = _Mode.REASONING, True
        else:
            self._mode, self._opener = _Mode.CALL, marker
            self._reader = self._calls.readers[marker]

    def _read_reasoning(self, is_all: bool) -> Delta:
        assert self._reasoning is not None, "nothing opens reasoning without a format"
        end = self._pending.find(self._reasoning.close)
        if end >= 0:
            text = self._pending[:end].rstrip()
            self._pending = self._pending[end + len(self._reasoning.close) :]
            told = Delta(reasoning=self._stripped(text))
            self._mode, self._strips = _Mode.TEXT, True
            return told
        markers = (self._reasoning.close,)
        length = len(self._pending) if is_all else self._certain(markers)
        return Delta(reasoning=self._stripped(self._take(length)))

    def _read_call(self, is_all: bool) -> Delta:
        assert self._reader is not None, "a call is read by its format's reader"
        reading = self._reader(self._pending, self._tools, is_all)
        if reading.status is Status.UNFINISHED:
            return self._cut_off() if is_all else Delta()
        self._mode, self._reader = _Mode.TEXT, None
        text = self._take(reading.length)
        if reading.status is Status.DONE:
            self._strips = True
            return Delta(tool_calls=reading.calls)
        return self._content(self._opener + text)

    def _cut_off(self) -> Delta:
        text = self._take(len(self._pending))
        self._mode, self._reader = _Mode.TEXT, None
        return Delta() if self._opener else self._content(text)

    def _content(self, text: str) -> Delta:
        text = self._stripped(text)
        self._has_content = self._has_content or bool(text.strip())
        return Delta(content=text)

    def _stripped(self, text: str) -> str:
        if self._strips:
            text = text.lstrip()
            self._strips = not text
        return text

    def _take(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        return text

    def _markers(self) -> tuple[str, ...]:
        return (*((self._reasoning.open,) if self._reasoning else ()), *self._calls.readers)

    def _first_marker(self) -> tuple[int, str] | None:
        found = [(self._pending.find(marker), -len(marker), marker) for marker in self._markers()]
        first = min((each for each in found if each[0] >= 0), default=None)
        return None if first is None else (first[0], first[2])

    def _certain(self, markers: tuple[str, ...]) -> int:
        """Return how many pending characters stand before what may become a marker."""
        text = self._pending
        longest = max(map(len, markers), default=1)
        for start in range(max(0, len(text) - longest + 1), len(text)):
            if any(marker.startswith(text[start:]) for marker in markers):
                text = text[:start]
                break
        # White space before a marker is left out, and the marker may still come.
        return len(text.rstrip()) if markers else len(text)
