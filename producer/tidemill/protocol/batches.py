"""Batches of OpenAI's API: their states, and what is known of one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import Any

from tidemill.protocol.errors import MalformedMessage
from tidemill.protocol.stored import require_number, require_text

#: Endpoints whose requests a batch may hold; ``OpenAITranslator`` knows what each of them means.
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
)

MAX_LINES = 50_000
#: Of one line of the input.
MAX_LINE_BYTES = 1 << 20
MIN_WINDOW_SECONDS = 60
MAX_WINDOW_SECONDS = 30 * 24 * 3600


class BatchState(StrEnum):
    """The states of OpenAI's batches."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Whether the batch can never change again."""
        return self in ENDED_STATES


ENDED_STATES = frozenset(
    {BatchState.COMPLETED, BatchState.FAILED, BatchState.EXPIRED, BatchState.CANCELLED}
)


@dataclass(frozen=True, slots=True)
class LineError:
    """What is wrong with the input: ``line`` counts from 1, None where it is about the file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return the error of OpenAI's API."""
        return {"code": self.code, "message": self.message, "line": self.line, "param": self.param}


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch about to be accepted; ``window`` is the text that means ``window_seconds``."""

    batch_id: str
    endpoint: str
    input_file_id: str
    window: str
    window_seconds: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    output_seconds: int | None = None
    callback_url: str = ""
    idempotency_key: str = ""

    @property
    def digest(self) -> str:
        """What another request with the same key must have as well."""
        return sha256(json.dumps(self.fields()).encode()).hexdigest()

    def fields(self) -> tuple[str | int, ...]:
        """Return what its hash holds at first, as names and values."""
        return (
            *("ep", self.endpoint, "in", self.input_file_id),
            *("cw", self.window, "md", json.dumps(dict(self.metadata), sort_keys=True)),
            *("oe", self.output_seconds or 0),
            *(("wh", self.callback_url) if self.callback_url else ()),
        )


@dataclass(frozen=True, slots=True)
class BatchUsage:
    """Tokens of the lines that were answered."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: "BatchUsage") -> "BatchUsage":
        return BatchUsage(
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
        )

    def plain(self) -> dict[str, Any]:
        """Return the usage of OpenAI's API."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


NO_USAGE = BatchUsage()


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as its hash tells; times in ms of the server's clock, 0 for not yet.

    ``num_answered`` and ``num_failed`` count lines, also those of parts that are not in the store
    yet; ``cursor`` counts the parts of the input of which jobs may have been submitted.  ``layout``
    holds the byte and the line at which each part begins.
    """

    batch_id: str
    state: BatchState
    endpoint: str
    input_file_id: str
    window: str
    created_ms: int
    expires_ms: int
    metadata: Mapping[str, str]
    output_seconds: int
    total: int
    num_answered: int
    num_failed: int
    usage: BatchUsage
    cursor: int
    layout: tuple[tuple[int, int], ...]
    model: str
    errors: tuple[Mapping[str, Any], ...]
    output_file_id: str
    error_file_id: str
    ending: str
    times: Mapping[str, int]

    @classmethod
    def read(cls, batch_id: str, fields: Mapping[bytes, bytes]) -> "Batch | None":
        """Return what a hash tells, None if there is none; raises ``MalformedMessage``."""
        if not fields:
            return None
        text, number = _Fields(fields).text, _Fields(fields).number
        return cls(
            batch_id=batch_id,
            state=_state(text("st")),
            endpoint=text("ep"),
            input_file_id=text("in"),
            window=text("cw"),
            created_ms=number("ca"),
            expires_ms=number("xa"),
            metadata=_json("md", text("md") or "{}", dict),
            output_seconds=number("oe"),
            total=number("n"),
            num_answered=max(number("ok"), number("lk")),
            num_failed=max(number("bad"), number("lb")),
            usage=BatchUsage(number("ui"), number("uc"), number("uo")),
            cursor=number("cur"),
            layout=tuple(map(tuple, _json("lay", text("lay") or "[]", list))),
            model=text("mo"),
            errors=tuple(_json("er", text("er") or "[]", list)),
            output_file_id=text("of"),
            error_file_id=text("ef"),
            ending=text("why"),
            times=_times(fields),
        )

    def plain(self) -> dict[str, Any]:
        """Return the object of OpenAI's API."""
        ended = self.state.is_terminal
        return {
            "id": self.batch_id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model or None,
            "errors": {"object": "list", "data": list(self.errors)} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.window,
            "status": str(self.state),
            "output_file_id": self.output_file_id or None if ended else None,
            "error_file_id": self.error_file_id or None if ended else None,
            "created_at": self.created_ms // 1000,
            "expires_at": self.expires_ms // 1000,
            **{f"{state}_at": self._seconds(state) for state in _TIMED},
            "request_counts": {
                "total": self.total,
                "completed": self.num_answered,
                "failed": self.num_failed,
            },
            "usage": self.usage.plain(),
            "metadata": dict(self.metadata) or None,
        }

    def _seconds(self, state: str) -> int | None:
        ms = self.times.get(state)
        return None if ms is None else ms // 1000


_TIMED = (
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
)


class _Fields:
    def __init__(self, fields: Mapping[bytes, bytes]) -> None:
        self._fields = fields

    def text(self, name: str) -> str:
        return require_text(name, self._fields.get(name.encode()))

    def number(self, name: str) -> int:
        return require_number(name, self._fields.get(name.encode()))


def _state(text: str) -> BatchState:
    try:
        return BatchState(text)
    except ValueError as error:
        raise MalformedMessage(f"st: {text[:40]!r} is no state of a batch") from error


def _json(name: str, text: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise MalformedMessage(f"{name}: not JSON") from error
    if not isinstance(value, kind):
        raise MalformedMessage(f"{name}: a {type(value).__name__} is no {kind.__name__}")
    return value


def _times(fields: Mapping[bytes, bytes]) -> dict[str, int]:
    names = [name.decode() for name in fields if name.startswith(b"t:") and name.isascii()]
    return {name[2:]: require_number(name, fields[name.encode()]) for name in names}


def told_errors(errors: Sequence[LineError]) -> str:
    """Return errors as the hash holds them."""
    return json.dumps([error.plain() for error in errors])
