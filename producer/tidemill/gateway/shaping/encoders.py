"""Vectors and scores as ``/v1/embeddings``, ``/v1/score`` and ``/v1/rerank`` tell them."""

import base64
import time
from collections.abc import Iterable, Sequence
from typing import Any

from tidemill.outcomes import Ranked, embeddings_of
from tidemill.protocol.outcomes import FLOAT_BYTES
from tidemill.result import Result


def embedding_list(result: Result, model: str, *, as_text: bool) -> dict[str, Any]:
    """Return all vectors, as numbers or as base64 of little-endian float32."""
    rows = _texts(result) if as_text else map(list, embeddings_of(result).vectors)
    data = [
        {"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)
    ]
    return {
        "id": f"embd-{result.job_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": _usage([result]),
    }


def score_list(results: Sequence[Result], scores: Iterable[float], model: str) -> dict[str, Any]:
    """Return the scores of pairs that the jobs computed."""
    data = [
        {"index": index, "object": "score", "score": score} for index, score in enumerate(scores)
    ]
    return {
        "id": f"score-{results[0].job_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": _usage(results),
    }


def ranking(
    result: Result, documents: Iterable[Ranked], model: str, *, has_texts: bool
) -> dict[str, Any]:
    """Return documents in the order given."""
    told = []
    for one in documents:
        entry: dict[str, Any] = {"index": one.index, "relevance_score": one.score}
        if has_texts:
            entry["document"] = {"text": one.document}
        told.append(entry)
    return {
        "id": f"rerank-{result.job_id}",
        "model": model,
        "results": told,
        "usage": _usage([result]),
    }


def _texts(result: Result) -> list[str]:
    found = embeddings_of(result)
    width = FLOAT_BYTES * found.size
    starts = range(0, len(found.data), width)
    return [base64.b64encode(found.data[start : start + width]).decode() for start in starts]


def _usage(results: Sequence[Result]) -> dict[str, int]:
    used = sum(result.usage.prompt_tokens for result in results)
    return {"prompt_tokens": used, "total_tokens": used}
