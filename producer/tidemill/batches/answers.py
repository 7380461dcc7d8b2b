"""Lines of a batch's output and of its error file; pure."""

import json
from collections.abc import Mapping
from typing import Any

from tidemill.batches.lines import RequestLine
from tidemill.protocol.errors import (
    InvalidRequest,
    JobCancelled,
    JobError,
    JobFailed,
    TidemillError,
    UnknownAdapter,
    UnknownModel,
)
from tidemill.protocol.states import JobState

_MESSAGES = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was not executed because the batch was cancelled.",
}


def request_id(batch_id: str, line: RequestLine) -> str:
    """Return the id of one request of a batch, the same whoever makes the line."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{line.number}"


def answered(batch_id: str, line: RequestLine, job_id: str, body: Mapping[str, Any]) -> bytes:
    """Return the line of the output that tells an answer."""
    response = {"status_code": 200, "request_id": job_id, "body": body}
    return _line(batch_id, line, response, None)


def refused(batch_id: str, line: RequestLine, error: TidemillError) -> bytes:
    """Return the line of the error file for a request that could not be answered."""
    status, kind, code = _status(error)
    told = {
        "message": error.one_line(),
        "type": kind,
        "param": error.field if isinstance(error, InvalidRequest) else None,
        "code": code,
    }
    job_id = error.job_id if isinstance(error, JobError) else request_id(batch_id, line)
    response = {"status_code": status, "request_id": job_id, "body": {"error": told}}
    return _line(batch_id, line, response, None)


def unanswered(batch_id: str, line: RequestLine, ending: str) -> bytes:
    """Return the line for a request whose batch was ``cancelled`` or ``expired`` before."""
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


def _status(error: TidemillError) -> tuple[int, str, str]:
    match error:
        case UnknownModel() | UnknownAdapter():
            return 404, "invalid_request_error", "model_not_found"
        case InvalidRequest():
            return 400, "invalid_request_error", "invalid_value"
        case JobFailed(state=JobState.FAILED):
            return 400, "invalid_request_error", "job_failed"
        case JobFailed(state=JobState.EXPIRED):
            return 504, "server_error", error.finish_reason or "deadline"
        case JobCancelled():
            return 409, "invalid_request_error", "job_cancelled"
    return 500, "server_error", "job_failed"
