"""Lines of a batch's output and of its error file; pure."""

import json
from collections.abc import Mapping
from typing import Any

from tidemill.batches.lines import RequestLine
from tidemill.gateway.errors import api_error
from tidemill.protocol.errors import JobError

_MESSAGES = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was not executed because the batch was cancelled.",
    "batch_failed": "This request was not executed because the batch failed.",
}


def request_id(batch_id: str, line: RequestLine) -> str:
    """Return the id of one request of a batch, the same whoever makes the line."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{line.number}"


def answered(batch_id: str, line: RequestLine, job_id: str, body: Mapping[str, Any]) -> bytes:
    """Return the line of the output that tells an answer."""
    response = {"status_code": 200, "request_id": job_id, "body": body}
    return _line(batch_id, line, response, None)


def refused(batch_id: str, line: RequestLine, error: Exception) -> bytes:
    """Return the line of the error file for a request that could not be answered."""
    told = api_error(error)
    job_id = error.job_id if isinstance(error, JobError) else request_id(batch_id, line)
    response = {"status_code": told.status, "request_id": job_id, "body": told.body}
    return _line(batch_id, line, response, None)


def unanswered(batch_id: str, line: RequestLine, ending: str) -> bytes:
    """Return the line for a request whose batch was ``cancelled``, ``expired``, ``failed``."""
    code = f"batch_{ending}"
    return _line(batch_id, line, None, {"code": code, "message": _MESSAGES[code]})


def _line(
    batch_id: str,
    line: RequestLine,
    response: Mapping[str, Any] | None,
    error: Mapping[str, Any] | None,
) -> bytes:
    told = {
        "id": request_id(batch_id, line),
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    # In ASCII: a custom_id may hold half of a surrogate pair.
    return json.dumps(told, separators=(",", ":")).encode() + b"\n"
