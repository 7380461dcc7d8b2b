"""How endpoints that stream on request are described."""

from typing import Any

#: As OpenAPI before 3.2 has it: the schema is that of one event.
EVENTS: dict[str, Any] = {
    "text/event-stream": {
        "schema": {
            "type": "object",
            "required": ["data"],
            "properties": {
                "data": {"type": "string"},
                "event": {"type": "string"},
                "id": {"type": "string"},
            },
        }
    }
}

STREAM_OR_BODY: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The whole answer or, with `stream`, server-sent events with parts of it"
        " and at last `[DONE]`",
        "content": EVENTS,
    }
}
