"""Asking the gateway of the tests, as its clients do."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx

from gateway.conftest import MODEL, Site


def post(site: Site, path: str, body: Any, **headers: str) -> httpx.Response:
    """Send a body; returns the answer, whatever its status."""
    return httpx.post(f"{site.url}{path}", json=body, headers=headers, timeout=60)


def ask(site: Site, path: str, **body: Any) -> dict[str, Any]:
    """Send a body to an endpoint of the test's model; returns that of the answer."""
    answer = post(site, path, {"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def stream(site: Site, path: str, **body: Any) -> list[dict[str, Any]]:
    """Send a body and return the events of the stream, but for ``[DONE]``, which must be last."""
    everything = {"model": MODEL, "stream": True, **body}
    with httpx.stream("POST", f"{site.url}{path}", json=everything, timeout=60) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def choices(events: list[dict[str, Any]], index: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the parts of one choice."""
    for event in events:
        yield from (choice for choice in event["choices"] if choice["index"] == index)
