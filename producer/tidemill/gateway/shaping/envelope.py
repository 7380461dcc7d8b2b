"""What surrounds the choices of an answer, and the usage."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from tidemill._version import __version__
from tidemill.protocol.messages import ModelCard, Usage


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that all events of one answer share; ``kind`` is its ``object``."""

    id: str
    kind: str
    created: int
    model: str
    fingerprint: str

    def of_kind(self, kind: str) -> "Envelope":
        """Return the same with another ``object``."""
        return replace(self, kind=kind)

    def around(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return a whole body or event."""
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
            "system_fingerprint": self.fingerprint,
        }

    def text_event(self, before: bytes, after: bytes) -> "TextEvent":
        """Return the maker of events that differ in one text alone.

        ``before`` and ``after`` stand around it in the only choice.
        """
        told = {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
        head = orjson.dumps(told)[:-1]
        return TextEvent(b"data: %b,%b%b" % (head, b'"choices":[', before), after + b"]}\n\n")


@dataclass(frozen=True, slots=True)
class TextEvent:
    """An event but for its text: most of a stream's events are of this kind."""

    head: bytes
    tail: bytes

    def of(self, text: str) -> bytes:
        """Return the event with this text."""
        return self.head + orjson.dumps(text) + self.tail


def fingerprint_of(card: ModelCard) -> str:
    """Return what changes where answers may: version of the software, revision of the model."""
    return f"tidemill-{__version__}-{card.revision[:12]}"


def usage_of(usages: Iterable[Usage]) -> dict[str, Any]:
    """Return the usage of jobs together."""
    told = list(usages)
    cached = sum(usage.cached_tokens for usage in told)
    return usage_fields(
        sum(usage.prompt_tokens for usage in told),
        sum(usage.completion_tokens for usage in told),
        cached,
    )


def usage_fields(num_prompt: int, num_completion: int, num_cached: int = 0) -> dict[str, Any]:
    """Return a usage, given the numbers of tokens."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
