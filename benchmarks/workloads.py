"""The engine workloads W1 to W4: token-id prompts and output lengths from a fixed seed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

TITLES = {
    "W1": "32 requests, prompt 64, output 128",
    "W2": "4 documents of 512 x 16 questions of 128, output 32",
    "W3": "64 requests, lognormal lengths, up to 1,024",
    "W4": "1 request, prompt 128, output 128",
}
# Ids below are control tokens and single bytes in many vocabularies.
_FIRST_ID = 1000


@dataclass(frozen=True)
class Request:
    """A prompt, and the exact number of tokens to generate for it."""

    prompt: list[int]
    num_output: int


def make_workload(name: str, vocab_size: int, seed: int) -> list[Request]:
    """Return the requests of a workload, all of which arrive at once."""
    generator = np.random.default_rng(seed)

    def draw(length: int) -> list[int]:
        return generator.integers(_FIRST_ID, vocab_size, length).tolist()  # type: ignore[no-any-return]

    makers: dict[str, Callable[[], list[Request]]] = {
        "W1": lambda: [Request(draw(64), 128) for _ in range(32)],
        "W2": partial(_shared_documents, generator, draw),
        "W3": partial(_mixed_lengths, generator, draw),
        "W4": lambda: [Request(draw(128), 128)],
    }
    return makers[name]()


def _shared_documents(
    generator: np.random.Generator, draw: Callable[[int], list[int]]
) -> list[Request]:
    documents = [draw(512) for _ in range(4)]
    requests = [Request(document + draw(128), 32) for document in documents for _ in range(16)]
    return [requests[index] for index in generator.permutation(len(requests))]


def _mixed_lengths(
    generator: np.random.Generator, draw: Callable[[int], list[int]]
) -> list[Request]:
    prompts = np.clip(generator.lognormal(np.log(120), 1.0, 64), 8, 768).astype(int)
    outputs = np.clip(generator.lognormal(np.log(100), 0.8, 64), 8, 512).astype(int)
    return [
        Request(draw(int(prompt)), int(min(output, 1024 - prompt)))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
