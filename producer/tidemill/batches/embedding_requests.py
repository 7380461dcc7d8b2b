"""Requests for embeddings in batches."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.async_client import AsyncProducer
from tidemill.batches.translation import Translated
from tidemill.job_kinds import EmbedOptions, EmbedSpec
from tidemill.outcomes import embeddings_of
from tidemill.protocol.errors import InvalidRequest
from tidemill.result import Result


async def plan_embeddings(producer: AsyncProducer, body: Mapping[str, Any]) -> Translated:
    """Return the job of a request; raises ``InvalidRequest``."""
    form = body.get("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise InvalidRequest(
            "encoding_format: it is neither float nor base64", field="encoding_format"
        )
    if body.get("input") is None:
        raise InvalidRequest("input: it is missing", field="input")
    card = await producer.model(body.get("model"))
    options: EmbedOptions = {"model": body.get("model")}
    if body.get("dimensions") is not None:
        options["dimensions"] = body["dimensions"]
    spec = EmbedSpec(body["input"], **options)

    def answer(results: Sequence[Result]) -> dict[str, Any]:
        return _answer(results[0], body.get("model") or card.name, as_text=form == "base64")

    return Translated([spec], answer, "input")


def _answer(result: Result, model: str, *, as_text: bool) -> dict[str, Any]:
    found = embeddings_of(result)
    width = 4 * found.size
    vectors: list[Any] = list(map(list, found.vectors))
    if as_text:
        rows = (found.data[start : start + width] for start in range(0, len(found.data), width))
        vectors = [base64.b64encode(row).decode() for row in rows]
    used = found.usage.prompt_tokens
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": used, "total_tokens": used},
    }
