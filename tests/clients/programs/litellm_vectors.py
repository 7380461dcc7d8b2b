"""LiteLLM with other kinds of models: embeddings, a ranking, and speech if there is a clip.

python litellm_vectors.py BASE_URL MODEL EMBEDDING_MODEL [SPEECH_MODEL CLIP]
"""

import asyncio
import json
import math
import sys
from importlib.metadata import version
from pathlib import Path

import litellm

BASE_URL, _, EMBEDDING_MODEL, *SPEECH = sys.argv[1:]
HOSTED = {"model": f"hosted_vllm/{EMBEDDING_MODEL}", "api_base": BASE_URL}
TEXTS = ["a cat", "a kitten", "the stock market"]


def main() -> None:
    litellm.suppress_debug_info = True
    vectors_tell_what_is_alike()
    documents_are_ranked()
    ran = ["embeddings", "rerank"]
    if SPEECH:
        speech_is_written_down(*SPEECH)
        ran.append("transcription")
    print(json.dumps({"client": "litellm", "version": version("litellm"), "ran": ran}))


def vectors_tell_what_is_alike() -> None:
    answer = litellm.embedding(input=TEXTS, **HOSTED)
    cat, kitten, stocks = (each["embedding"] for each in answer.data)
    assert len(cat) == 384 and math.isclose(math.hypot(*cat), 1, rel_tol=1e-4), cat[:4]
    assert alike(cat, kitten) > 0.5 > 0.2 > alike(cat, stocks)
    assert answer.usage.prompt_tokens > 0, answer.usage
    again = asyncio.run(litellm.aembedding(input=TEXTS[:1], **HOSTED))
    assert math.dist(again.data[0]["embedding"], cat) < 1e-4


def alike(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def documents_are_ranked() -> None:
    ranking = litellm.rerank(query="small felines", documents=TEXTS, top_n=2, **HOSTED)
    found = [each["index"] for each in ranking.results]
    assert sorted(found) == [0, 1], ranking
    scores = [each["relevance_score"] for each in ranking.results]
    assert scores == sorted(scores, reverse=True), ranking


def speech_is_written_down(model: str, clip: str) -> None:
    asked = {"model": f"hosted_vllm/{model}", "api_base": BASE_URL}
    with Path(clip).open("rb") as file:
        heard = litellm.transcription(file=file, **asked)
    assert "ask not what your country can do for you" in heard.text, heard


if __name__ == "__main__":
    main()
