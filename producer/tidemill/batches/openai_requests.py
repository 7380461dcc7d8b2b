"""What the requests of a batch mean: the same as those that the gateway gets one by one."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from tidemill.batches.translation import Translated
from tidemill.gateway.answering import Plan
from tidemill.gateway.body_values import check_values
from tidemill.gateway.call import Call
from tidemill.gateway.chatting import plan_chat
from tidemill.gateway.checks import check_callback
from tidemill.gateway.completing import plan_completion
from tidemill.gateway.embedding import plan_embeddings
from tidemill.gateway.identity import Identity
from tidemill.gateway.key_limits import KeyAccount
from tidemill.gateway.openai_models.chat import ChatRequest
from tidemill.gateway.openai_models.completions import CompletionRequest
from tidemill.gateway.openai_models.embeddings import EmbeddingRequest
from tidemill.gateway.openai_models.responses import ResponseRequest
from tidemill.gateway.responding import conversation_of
from tidemill.gateway.response_plans import plan_response
from tidemill.gateway.shaping.envelope import Envelope, fingerprint_of, usage_of
from tidemill.gateway.state import GatewayState
from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.messages import invalid_request
from tidemill.result import Result

Body = Mapping[str, Any]
Model = TypeVar("Model", bound=BaseModel)

#: A batch has no streams.
_LEFT_OUT = frozenset({"stream", "stream_options"})


class OpenAITranslator:
    """Translates the requests of one tenant's batches."""

    def __init__(self, state: GatewayState, tenant: str) -> None:
        self._state, self._identity = state, Identity(tenant)
        self._allow_private = state.settings.allow_private_webhooks
        self._endpoints: dict[str, Callable[[Body], Awaitable[Translated]]] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completion,
            "/v1/embeddings": self._embeddings,
            "/v1/responses": self._response,
        }

    async def translate(self, endpoint: str, body: Body) -> Translated:
        """Return the jobs of a request; raises ``InvalidRequest``."""
        if endpoint not in self._endpoints:
            raise InvalidRequest(f"url: {endpoint} is not served in batches", field="url")
        fields = {name: value for name, value in body.items() if name not in _LEFT_OUT}
        # Whoever sends it by itself is told of these before anything is made of it, too.
        check_values(fields)
        translated = await self._endpoints[endpoint](fields)
        for spec in translated.specs:
            check_callback(spec.callback_url, allow_private=self._allow_private)
        return translated

    async def _chat(self, body: Body) -> Translated:
        return _of_plan(await plan_chat(self._call(body), _parsed(ChatRequest, body)))

    async def _completion(self, body: Body) -> Translated:
        return _of_plan(await plan_completion(self._call(body), _parsed(CompletionRequest, body)))

    async def _embeddings(self, body: Body) -> Translated:
        producer = self._state.producer(self._identity.tenant)
        plan = await plan_embeddings(producer, _parsed(EmbeddingRequest, body))
        return Translated(plan.specs, plan.body, "input")

    async def _response(self, body: Body) -> Translated:
        # What is kept of a response is kept when it is accepted, and a batch keeps it anyway.
        request = _parsed(ResponseRequest, {**body, "background": False, "store": False})
        call = self._call(body)
        items = await conversation_of(call, request)
        plan = await plan_response(call, request, items)
        return Translated([plan.spec], lambda results: plan.body(results[0]), "input")

    def _call(self, body: Body) -> Call:
        length = str(len(orjson.dumps(body))).encode()
        scope = {"type": "http", "headers": [(b"content-length", length)]}
        request = Request(scope)
        account = KeyAccount(self._state, self._identity, request)
        return Call(request, self._state, self._identity, "", account)


def _parsed(model: type[Model], body: Body) -> Model:
    try:
        return model.model_validate(dict(body))
    except ValidationError as error:
        raise invalid_request(error) from error


def _of_plan(plan: Plan) -> Translated:
    def answer(results: Sequence[Result]) -> dict[str, Any]:
        envelope = Envelope(
            id=f"{plan.id_prefix}-{results[0].job_id}",
            kind=plan.kind,
            created=int(time.time()),
            model=plan.model,
            fingerprint=fingerprint_of(plan.card),
        )
        usage = usage_of([result.usage for result in results])
        return {**plan.shape.body(results, envelope), "usage": usage}

    return Translated(plan.specs, answer, plan.prompt_field)
