"""How endpoints that stream on request are described."""

from typing import Any

STREAM_OR_BODY: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The whole answer or, with `stream`, server-sent events with parts of it"
        " and at last `[DONE]`",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}
