"""Which scope each route needs; checked in one place, before the route reads its fields."""

from collections.abc import Mapping

from starlette.requests import Request

from tidemill.access.api_keys import KeyScope
from tidemill.gateway.identity import OPEN_PATHS, Identity
from tidemill.gateway.key_limits import KeyAccount
from tidemill.protocol.errors import Unauthenticated

_SUBMIT, _READ, _CANCEL = KeyScope.SUBMIT, KeyScope.READ, KeyScope.CANCEL

#: By method and path, as routes name it.  Of the open paths those that can be closed.
RULES: Mapping[tuple[str, str], KeyScope] = {
    ("GET", "/load"): _READ,
    ("GET", "/metrics"): _READ,
    ("HEAD", "/metrics"): _READ,
    ("GET", "/v1/models"): _READ,
    ("GET", "/v1/models/{name:path}"): _READ,
    ("POST", "/v1/completions"): _SUBMIT,
    ("POST", "/v1/chat/completions"): _SUBMIT,
    ("POST", "/v1/responses"): _SUBMIT,
    ("POST", "/v1/responses/input_tokens"): _READ,
    ("GET", "/v1/responses/{response_id}"): _READ,
    ("GET", "/v1/responses/{response_id}/input_items"): _READ,
    ("POST", "/v1/responses/{response_id}/cancel"): _CANCEL,
    ("DELETE", "/v1/responses/{response_id}"): _CANCEL,
    ("POST", "/v1/embeddings"): _SUBMIT,
    ("POST", "/v1/rerank"): _SUBMIT,
    ("POST", "/v2/rerank"): _SUBMIT,
    ("POST", "/rerank"): _SUBMIT,
    ("POST", "/v1/score"): _SUBMIT,
    ("POST", "/score"): _SUBMIT,
    ("POST", "/v1/audio/transcriptions"): _SUBMIT,
    ("POST", "/v1/audio/translations"): _SUBMIT,
    ("POST", "/v1/messages"): _SUBMIT,
    ("POST", "/v1/messages/count_tokens"): _READ,
    ("POST", "/tokenize"): _READ,
    ("POST", "/detokenize"): _READ,
    ("GET", "/tokenizer_info"): _READ,
    ("POST", "/v1/jobs"): _SUBMIT,
    ("GET", "/v1/jobs"): _READ,
    ("GET", "/v1/jobs/{job_id}"): _READ,
    ("GET", "/v1/jobs/{job_id}/result"): _READ,
    ("GET", "/v1/jobs/{job_id}/stream"): _READ,
    ("POST", "/v1/jobs/{job_id}/cancel"): _CANCEL,
    ("DELETE", "/v1/jobs/{job_id}"): _CANCEL,
    ("POST", "/v1/files"): _SUBMIT,
    ("GET", "/v1/files"): _READ,
    ("GET", "/v1/files/{file_id}"): _READ,
    ("GET", "/v1/files/{file_id}/content"): _READ,
    ("DELETE", "/v1/files/{file_id}"): _SUBMIT,
    ("POST", "/v1/batches"): _SUBMIT,
    ("GET", "/v1/batches"): _READ,
    ("GET", "/v1/batches/{batch_id}"): _READ,
    ("POST", "/v1/batches/{batch_id}/cancel"): _CANCEL,
}

#: Of what is read, what costs as much as a submission: prompts are tokenised for it.
_COUNTED_READS = frozenset(
    {"/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"}
)

#: What a route without a rule needs: that one was forgotten must open nothing.
_WITHOUT_RULE = KeyScope.ADMIN


async def enforce(request: Request) -> None:
    """Raise ``Forbidden`` unless the caller may use the route; for every route of the app.

    A submission, or what costs as much, is taken from what the caller's key may submit, or raises
    ``RateLimited``.
    """
    path: str = request.scope["route"].path
    identity: Identity | None = getattr(request.state, "identity", None)
    if identity is None:
        if path not in OPEN_PATHS:
            raise Unauthenticated("nobody has looked who calls", fix="Report this as a bug.")
        return
    scope = RULES.get((request.method, path), _WITHOUT_RULE)
    identity.require(scope)
    if scope == KeyScope.SUBMIT or path in _COUNTED_READS:
        await KeyAccount(request.app.state.gateway, identity, request).take_request()
