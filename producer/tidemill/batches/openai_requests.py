"""What the requests of a batch mean, as OpenAI's API has it."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill._request import JobOptions, JobSpec
from tidemill.async_client import AsyncProducer
from tidemill.batches.translation import Translated
from tidemill.openai.conversation import template_messages
from tidemill.protocol.errors import InvalidRequest
from tidemill.result import Result

_OPTIONS = ("model", "max_tokens", "temperature", "top_p", "seed", "stop", "n", "ignore_eos")


class OpenAITranslator:
    """Translates the requests of one client's batches."""

    def __init__(self, producer: AsyncProducer) -> None:
        self._producer = producer

    async def translate(self, endpoint: str, body: Mapping[str, Any]) -> Translated:
        """Return the jobs of a request; raises ``InvalidRequest``."""
        given: Any = {name: body[name] for name in _OPTIONS if body.get(name) is not None}
        options: JobOptions = given
        if endpoint == "/v1/completions":
            spec = JobSpec(_prompt(body), **options)
            return Translated([spec], lambda results: _completion(body, results))
        if endpoint == "/v1/chat/completions":
            spec = JobSpec(template_messages(body.get("messages")), **options)
            return Translated([spec], lambda results: _chat(body, results))
        raise InvalidRequest(f"url: {endpoint} is not served in batches", field="url")


def _prompt(body: Mapping[str, Any]) -> Any:
    if body.get("prompt") is None:
        raise InvalidRequest("prompt: it is missing", field="prompt")
    return body["prompt"]


def _completion(body: Mapping[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    choices = [
        {"index": c.index, "text": c.text, "finish_reason": c.finish_reason, "logprobs": None}
        for c in results[0].choices
    ]
    return _around(body, results[0], "text_completion", choices)


def _chat(body: Mapping[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    choices = [
        {
            "index": c.index,
            "message": {"role": "assistant", "content": c.text},
            "finish_reason": c.finish_reason,
        }
        for c in results[0].choices
    ]
    return _around(body, results[0], "chat.completion", choices)


def _around(
    body: Mapping[str, Any], result: Result, kind: str, choices: list[dict[str, Any]]
) -> dict[str, Any]:
    usage = result.usage
    return {
        "id": result.job_id,
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model"),
        "choices": choices,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }
