"""The events of a response, made of what its job produced.

Events follow from the response's head and its token log alone, number by number: whoever makes
them again makes the same, which is how a stream goes on behind any number.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from tidemill._follow import Chunk
from tidemill.gateway.errors import ApiError
from tidemill.gateway.shaping.logprobs import TokenNames, chat_logprobs
from tidemill.gateway.shaping.responses import ResponseHead, item_id
from tidemill.openai.chat import Parser
from tidemill.openai.deltas import Delta, ToolCall, call_id
from tidemill.protocol.messages import JobEnd
from tidemill.protocol.states import JobState

#: Kind of an item that holds text -> its part, and the events of that.
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


@dataclass(slots=True)
class ResponseEvents:
    """Turns what a job produces into events, and at its end into the whole response.

    Events up to the number ``after`` are made, but not told.
    """

    head: ResponseHead
    parser: Parser
    names: TokenNames | None = None
    after: int = -1
    body: dict[str, Any] | None = None
    _number: int = 0
    _items: list[dict[str, Any]] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _logprobs: list[dict[str, Any]] = field(default_factory=list)
    _held_logprobs: list[dict[str, Any]] = field(default_factory=list)
    _is_open: bool = False
    _has_begun: bool = False
    _num_calls: int = 0
    _num_tokens: int = 0

    @property
    def has_output(self) -> bool:
        """Whether anything of the output has been told."""
        return bool(self._items)

    def start(self) -> bytes:
        """Return the events that tell that the response is there."""
        first = "queued" if self.head.is_background else "in_progress"
        told = self._event("response.created", response=self.head.body(first))
        if self.head.is_background:
            return told + self._event("response.queued", response=self.head.body(first))
        return told + self._begin()

    def of_chunk(self, chunk: Chunk) -> bytes:
        """Return the events that tell a chunk; maybe none."""
        told = self._begin()
        self._num_tokens += len(chunk.ids)
        if self.names is not None:
            self._held_logprobs += self._told_logprobs(chunk, self.names)
        return told + self._tell(self.parser.feed(chunk.text))

    def of_end(self, end: JobEnd) -> bytes:
        """Return the events that tell how the job ended; from then on there is a ``body``."""
        is_done = end.state == JobState.DONE
        told = self._begin() if is_done else b""
        told += self._tell(self.parser.finish())
        if is_done and not self._items:
            told += self._open("message")
        kind, body = self.head.ended(end, (), self._num_tokens)
        told += self._close("completed" if kind == "completed" else "incomplete")
        self.body = {**body, "output": self._items}
        return told + self._event(f"response.{kind}", response=self.body)

    def of_error(self, error: ApiError) -> bytes:
        """Return the event that ends a stream which could not go on.

        It bears the number of the last event told: whoever goes on behind it misses nothing.
        """
        told = {"code": error.code, "message": error.message, "param": error.param}
        return _encoded("error", max(self.after, self._number - 1, 0), told)

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return self._event("response.in_progress", response=self.head.body("in_progress"))

    def _tell(self, delta: Delta) -> bytes:
        told = b""
        if delta.reasoning:
            told += self._open("reasoning") + self._add(delta.reasoning, [])
            self._held_logprobs = []
        is_text = self._is_open and self._items[-1]["type"] == "message"
        if delta.content and (is_text or delta.content.strip() or not self._num_calls):
            told += self._open("message")
            logprobs, self._held_logprobs = self._held_logprobs, []
            told += self._add(delta.content, logprobs)
        for call in delta.tool_calls:
            told += self._call(call)
            self._held_logprobs = []
        return told

    def _open(self, kind: str) -> bytes:
        if self._is_open and self._items[-1]["type"] == kind:
            return b""
        told = self._close("completed")
        item: dict[str, Any] = {
            "id": item_id(kind, self.head.job_id, len(self._items)),
            "type": kind,
            "status": "in_progress",
        }
        if kind == "reasoning":
            item["summary"] = []
        else:
            item["role"] = "assistant"
        item["content"] = []
        told += self._add_item(item)
        self._is_open, self._text, self._logprobs = True, [], []
        return told + self._part("added", self._part_of(kind))

    def _add(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        item = self._items[-1]
        self._text.append(text)
        self._logprobs += logprobs
        more = {"logprobs": logprobs} if item["type"] == "message" else {}
        return self._in_part(f"response.{_PARTS[item['type']]}.delta", delta=text, **more)

    def _close(self, status: str) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        item = self._items[-1]
        part = self._part_of(item["type"])
        more = {"logprobs": self._logprobs} if item["type"] == "message" else {}
        told = self._in_part(f"response.{part['type']}.done", text=part["text"], **more)
        told += self._part("done", part)
        item["content"], item["status"] = [part], status
        return told + self._end_item(item)

    def _call(self, call: ToolCall) -> bytes:
        told = self._close("completed")
        item = {
            "id": item_id("function_call", self.head.job_id, len(self._items)),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call_id(self.head.job_id, self._num_calls),
            "name": call.name,
            "arguments": "",
        }
        self._num_calls += 1
        told += self._add_item(item)
        kind, arguments = "response.function_call_arguments", call.arguments
        told += self._in_item(f"{kind}.delta", delta=arguments)
        told += self._in_item(f"{kind}.done", name=call.name, arguments=arguments)
        item["arguments"], item["status"] = arguments, "completed"
        return told + self._end_item(item)

    def _part_of(self, kind: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _PARTS[kind], "text": "".join(self._text)}
        if kind == "message":
            part |= {"annotations": [], "logprobs": self._logprobs}
        return part

    def _add_item(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        place = len(self._items) - 1
        return self._event("response.output_item.added", output_index=place, item=item)

    def _end_item(self, item: dict[str, Any]) -> bytes:
        place = len(self._items) - 1
        return self._event("response.output_item.done", output_index=place, item=item)

    def _part(self, what: str, part: dict[str, Any]) -> bytes:
        return self._in_part(f"response.content_part.{what}", part=part)

    def _in_part(self, kind: str, **told: Any) -> bytes:
        return self._in_item(kind, content_index=0, **told)

    def _in_item(self, kind: str, **told: Any) -> bytes:
        place = len(self._items) - 1
        return self._event(kind, item_id=self._items[-1]["id"], output_index=place, **told)

    def _event(self, kind: str, **told: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return b"" if number <= self.after else _encoded(kind, number, told)

    def _told_logprobs(self, chunk: Chunk, names: TokenNames) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = chat_logprobs(chunk.ids, chunk.logprobs or (), names)[
            "content"
        ]
        return told


def _encoded(kind: str, number: int, told: Mapping[str, Any]) -> bytes:
    data = orjson.dumps({"type": kind, "sequence_number": number, **told})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
