"""Vectors and speech with OpenAI's client.

python openai_media.py BASE_URL MODEL EMBEDDING_MODEL [SPEECH_MODEL FILE], of a known speech
"""

import asyncio
import json
import math
import sys
from pathlib import Path

import openai

BASE_URL, _, EMBEDDER = sys.argv[1:4]
SPEECH = sys.argv[4:]
client = openai.OpenAI(base_url=BASE_URL, api_key="none")
TEXTS = ["A cat sits on the mat.", "A kitten rests on a rug.", "Stocks fell sharply today."]
SENTENCE = "ask not what your country can do for you"


def likeness(one: list[float], other: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def embeddings() -> None:
    # Asks for base64 by itself.
    told = client.embeddings.create(model=EMBEDDER, input=TEXTS)
    cat, kitten, stocks = (each.embedding for each in told.data)
    assert len(cat) == 384 and math.isclose(likeness(cat, cat), 1, abs_tol=1e-5)
    assert likeness(cat, kitten) > 0.5 > likeness(cat, stocks) + 0.3
    assert told.usage.prompt_tokens == told.usage.total_tokens > 0
    single = client.embeddings.create(model=EMBEDDER, input=TEXTS[0], encoding_format="float")
    assert likeness(single.data[0].embedding, cat) > 0.9999


def dimensions() -> None:
    told = client.embeddings.create(model=EMBEDDER, input=TEXTS[0], dimensions=64)
    assert len(told.data[0].embedding) == 64
    assert math.isclose(likeness(told.data[0].embedding, told.data[0].embedding), 1, abs_tol=1e-5)


async def asynchronous() -> None:
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key="none") as other:
        told = await asyncio.gather(
            *(other.embeddings.create(model=EMBEDDER, input=text) for text in TEXTS)
        )
        assert all(len(each.data[0].embedding) == 384 for each in told)
        if SPEECH:
            model, file = SPEECH
            heard = await other.audio.transcriptions.create(model=model, file=Path(file))
            assert SENTENCE in plain(heard.text)


def plain(text: str) -> str:
    words = "".join(c for c in text.lower() if c.isalpha() or c == " ")
    return " ".join(words.split())


def speech(model: str, file: str) -> None:
    with open(file, "rb") as opened:
        heard = client.audio.transcriptions.create(model=model, file=opened)
    assert SENTENCE in plain(heard.text)
    verbose = client.audio.transcriptions.create(
        model=model,
        file=Path(file),
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert verbose.language == "en" and 10 < verbose.duration < 12
    assert SENTENCE in plain("".join(segment.text for segment in verbose.segments))
    assert SENTENCE in plain(" ".join(word.word for word in verbose.words))
    srt = client.audio.transcriptions.create(model=model, file=Path(file), response_format="srt")
    assert srt.startswith("1\n00:00:0") and " --> " in srt
    events = list(client.audio.transcriptions.create(model=model, file=Path(file), stream=True))
    assert SENTENCE in plain(events[-1].text)


embeddings()
dimensions()
ran = ["embeddings"]
if SPEECH:
    speech(*SPEECH)
    ran.append("audio")
asyncio.run(asynchronous())
print(json.dumps({"client": "openai", "version": openai.__version__, "ran": ran}))
