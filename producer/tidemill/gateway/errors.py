"""Errors as OpenAI's API tells them: a status, a body, and when to try again."""

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tidemill.protocol.complaints import complaint_of
from tidemill.protocol.errors import (
    AccessDenied,
    BatchClosed,
    BlobError,
    BlobUnavailable,
    BrokerError,
    ContextExceeded,
    Forbidden,
    IdempotencyConflict,
    InvalidRequest,
    JobCancelled,
    JobFailed,
    JobNotFinished,
    JobNotFound,
    NoSuchObject,
    Overloaded,
    QueueFull,
    RateLimited,
    RequestTooLarge,
    TidemillError,
    UnknownAdapter,
    UnknownModel,
    WrongState,
)
from tidemill.protocol.states import JobState

_log = logging.getLogger(__name__)

#: OpenAI's clients give up for good where they are told to wait longer.
MAX_RETRY_AFTER_SECONDS = 120
BROKER_RETRY_AFTER_SECONDS = 2
_STORE_RETRY_AFTER_SECONDS = 5
#: What nginx calls a client that left before its answer; nobody reads it but the metrics.
CLIENT_GONE_STATUS = 499

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_NO_RETRY = {"x-should-retry": "false"}


@dataclass(frozen=True, slots=True)
class ApiError:
    """One error as it is told; ``type`` and ``code`` have the values OpenAI's clients know."""

    status: int
    message: str
    type: str = _INVALID
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """The body; also what an event tells within a stream."""
        told = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": told}

    def encoded(self) -> bytes:
        """The body as bytes; in ASCII, because a message may quote half of a surrogate pair."""
        return json.dumps(self.body, separators=(",", ":")).encode()

    def response(self) -> Response:
        """The whole answer."""
        return Response(
            self.encoded(), self.status, dict(self.headers), media_type="application/json"
        )


#: What requests are told that a drain cuts off.  Whoever tries again finds another gateway, or one
#: that was started anew.
STOPPING = ApiError(
    503,
    "the server stops; send the request again",
    _SERVER,
    "stopping",
    headers={"retry-after": "1"},
)


def api_error(error: Exception) -> ApiError:
    """Return how an error is told; what is not ours is told as nothing but a server error."""
    for kind, tell in _TOLD:
        if isinstance(error, kind):
            return tell(error)
    # What the system refuses, such as memory or a file, it may grant later; a fault stays one.
    headers = {} if isinstance(error, OSError | MemoryError) else _NO_RETRY
    told = "the server failed; its log tells why"
    return ApiError(500, told, _SERVER, "internal_error", headers=headers)


def error_response(error: Exception) -> Response:
    """Return the answer that tells an error."""
    return api_error(error).response()


async def handle_error(request: Request, error: Exception) -> Response:
    """Answer a request that raised; for ``FastAPI.add_exception_handler``."""
    told = api_error(error)
    if isinstance(error, HTTPException) and told.message == HTTPStatus(told.status).phrase:
        told = replace(told, message=_unrouted(request, told))
    if told.code == "internal_error" and isinstance(error, TidemillError):
        # What is not ours is logged where it is caught.
        _log.error("%s %s: %s", request.method, request.url.path, error.one_line())
    return told.response()


def _invalid(error: InvalidRequest) -> ApiError:
    status, code = 400, "invalid_value"
    match error:
        case UnknownModel() | UnknownAdapter():
            status, code = 404, "model_not_found"
        case IdempotencyConflict():
            status, code = 409, "idempotency_conflict"
        case BatchClosed():
            status, code = 409, "batch_closed"
        case ContextExceeded():
            code = "context_length_exceeded"
        case RequestTooLarge():
            status, code = 413, "request_too_large"
    headers = _NO_RETRY if status == HTTPStatus.CONFLICT else {}
    param = error.field.removeprefix("params.") or None
    message = error.one_line().removeprefix("params.")
    return ApiError(status, message, code=code, param=param, headers=headers)


def _denied(error: AccessDenied) -> ApiError:
    if isinstance(error, Forbidden):
        return ApiError(403, error.one_line(), "permission_error", "insufficient_permissions")
    challenge = {"www-authenticate": "Bearer"}
    return ApiError(401, error.one_line(), code="invalid_api_key", headers=challenge)


def _overloaded(error: Overloaded) -> ApiError:
    kind = error.unit if isinstance(error, RateLimited) else "server_overloaded"
    code = "queue_full" if isinstance(error, QueueFull) else "rate_limit_exceeded"
    headers = _retry_after(error.retry_after_seconds)
    return ApiError(429, error.one_line(), kind, code, headers=headers)


def _broker_away(error: BrokerError) -> ApiError:
    headers = _retry_after(BROKER_RETRY_AFTER_SECONDS)
    _log.warning("the broker: %s", error.message)
    return ApiError(503, "the queue cannot be reached", _SERVER, "unavailable", headers=headers)


def _store_away(error: BlobUnavailable) -> ApiError:
    headers = _retry_after(_STORE_RETRY_AFTER_SECONDS)
    _log.warning("%s", error.one_line())
    # Addresses within the operator's network are not the client's to know.
    return ApiError(
        503, "the store of files cannot be reached", _SERVER, "unavailable", headers=headers
    )


def _retry_after(seconds: float) -> dict[str, str]:
    whole = math.ceil(seconds) if math.isfinite(seconds) else MAX_RETRY_AFTER_SECONDS
    return {"retry-after": str(min(MAX_RETRY_AFTER_SECONDS, max(1, whole)))}


def _job_failed(error: JobFailed) -> ApiError:
    if error.state == JobState.EXPIRED:
        code = error.finish_reason or "deadline"
        return ApiError(504, error.one_line(), _SERVER, code, headers=_NO_RETRY)
    # A job that no worker can run fails; one that workers failed on is dead.
    if error.state == JobState.FAILED:
        return ApiError(400, error.one_line(), code="job_failed")
    return ApiError(500, error.one_line(), _SERVER, "job_failed", headers=_NO_RETRY)


def _http(error: HTTPException) -> ApiError:
    if isinstance(error.__cause__, RecursionError):
        return _not_json("it nests too deep")
    if isinstance(error.__cause__, UnicodeDecodeError):
        return _not_json("it is not UTF-8")
    if type(error.__cause__) is ValueError and "digits" in str(error.__cause__):
        # Python reads none of more than 4,300, which an integer of 64 bits is far from having.
        return _not_json("an integer in it has thousands of digits")
    kind = _INVALID if error.status_code < HTTPStatus.INTERNAL_SERVER_ERROR else _SERVER
    codes = {
        404: "not_found",
        405: "method_not_allowed",
        408: "timeout",
        413: "request_too_large",
        415: "unsupported_media_type",
    }
    return ApiError(
        error.status_code,
        str(error.detail),
        kind,
        codes.get(error.status_code),
        headers=error.headers or {},
    )


def _unrouted(request: Request, told: ApiError) -> str:
    """What the router's own words leave out; clients have methods for endpoints of others."""
    asked = f"{request.method} {request.url.path[:200]}"
    if told.status == HTTPStatus.METHOD_NOT_ALLOWED:
        return f"{asked}: this path is not for {request.method}. See GET /docs."
    return f"{asked}: there is no such endpoint here. See GET /docs."


def _not_json(reason: str) -> ApiError:
    return ApiError(400, f"the body is not JSON: {reason}", code="invalid_json")


def _malformed(error: RequestValidationError) -> ApiError:
    problems = error.errors()
    if problems[0]["type"] == "json_invalid":
        return _not_json(problems[0].get("ctx", {}).get("error", ""))
    # The first part says whether it is of the body, the path or the query.
    where = str(problems[0]["loc"][0])
    inner = [{**problem, "loc": problem["loc"][1:]} for problem in problems]
    field, reason = complaint_of(inner)
    return ApiError(400, f"{field or where}: {reason}", code="invalid_value", param=field or None)


def _not_unicode(error: UnicodeEncodeError) -> ApiError:
    return ApiError(400, "the body: a text has half of a surrogate pair", code="invalid_value")


def _of_job(status: int, kind: str, code: str) -> Callable[[Any], ApiError]:
    def tell(error: TidemillError) -> ApiError:
        return ApiError(status, error.one_line(), kind, code, headers=_NO_RETRY)

    return tell


#: How errors are told, by their kinds; the first that fits counts.
_TOLD: tuple[tuple[type[Exception], Callable[[Any], ApiError]], ...] = (
    (InvalidRequest, _invalid),
    (AccessDenied, _denied),
    (Overloaded, _overloaded),
    (BrokerError, _broker_away),
    (JobFailed, _job_failed),
    (JobNotFound, _of_job(404, _INVALID, "not_found")),
    (JobNotFinished, _of_job(504, _SERVER, "timeout")),
    (JobCancelled, _of_job(409, _INVALID, "job_cancelled")),
    (NoSuchObject, _of_job(404, _INVALID, "not_found")),
    (WrongState, _of_job(409, _INVALID, "invalid_state")),
    (BlobUnavailable, _store_away),
    (BlobError, _of_job(503, _SERVER, "unavailable")),
    (TidemillError, _of_job(500, _SERVER, "internal_error")),
    (HTTPException, _http),
    (RequestValidationError, _malformed),
    (UnicodeEncodeError, _not_unicode),
)
