"""Jobs for combinations of the engine's features, and what must come of each of them."""

import random
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

from support.pairwise import Row, allowed_rows, covering_rows
from support.tiny_tokenizers import byte_level_tokenizer
from tidemill.protocol.sampling import SamplingParams
from tidemill.protocol.structured import StructuredOutput

TOKENIZER = byte_level_tokenizer()
NUM_TOKENS = 16
#: Few enough tokens that a random model repeats itself, and guesses come true.
FEW = (5, 6)
ADAPTERS = ("all", "part")
STRUCTURES: dict[str, StructuredOutput] = {
    # What the prompts say again and again.
    "regex": StructuredOutput.model_validate({"regex": "(axb |ayb ){2}[0-9]"}),
    "json": StructuredOutput.model_validate(
        {
            "json_schema": {
                "type": "array",
                "items": {"enum": [1, 22]},
                "minItems": 2,
                "maxItems": 3,
            }
        }
    ),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "prefix_cache": (True, False),
    "chunks": (True, False),
    "memory": ("roomy", "recompute", "swap"),
    "answers": ("one", "three", "beams"),
    "logprobs": (None, 2),
    "structure": (None, "regex", "json"),
    "num_drafted": (0, 4),
    "adapters": ("none", "one", "mixed"),
    "block_size": (16, 32),
    "sampling": ("greedy", "seeded"),
    "batch": ("one", "mixed"),
    "kv_dtype": ("auto", "int8"),
}


@dataclass(frozen=True, slots=True)
class FeatureJob:
    """What somebody asks for; ``structure`` and ``adapter`` are names."""

    prompt: tuple[int, ...]
    params: SamplingParams
    structure: str | None = None
    adapter: str | None = None
    priority: int = 0

    @property
    def seed(self) -> int:
        """Another one for each prompt."""
        return crc32(repr(self.prompt).encode())

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal jobs."""
        return (self.prompt, self.params.model_dump_json(), self.structure, self.adapter)


def is_allowed(row: Row) -> bool:
    """Whether these features can be asked for together, and do something."""
    if row["memory"] == "swap" and not row["prefix_cache"]:
        # What was swapped out is found by its hash.
        return False
    if row["batch"] == "one":
        # The most urgent sequence is never preempted.
        is_preempted = row["memory"] != "roomy"
        if row["adapters"] == "mixed" or (is_preempted and row["answers"] == "one"):
            return False
    if row["answers"] == "beams":
        edits = (row["sampling"] == "seeded", row["structure"], row["logprobs"])
        return not any(edits)
    # The same answer several times is refused.
    return bool(row["answers"] == "one" or row["sampling"] == "seeded")


ROWS = allowed_rows(FACTORS, is_allowed)
PAIRWISE = covering_rows(ROWS, seed=3)


def make_prompt(number: int) -> tuple[int, ...]:
    """All repeat themselves; 0 to 2 begin alike and will soon need a block more, 3 is short."""
    shared = "axb ayb axb axb " * 4 if number < 3 else ""
    text = shared + f"{number}: " + "ab cab " * (2 + number // 3) + "c" * (number % 3)
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def jobs_of(row: Row) -> list[FeatureJob]:
    """Return the row's jobs: one, or two of the kind among others."""
    kind = {"structure": row["structure"], "params": _params(row)}
    jobs = [FeatureJob(make_prompt(0), **kind)]
    if row["batch"] == "mixed":
        plain = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
        loaded = SamplingParams(
            temperature=0.6, max_tokens=12, min_p=0.01, presence_penalty=0.5, logprobs=1
        )
        jobs += [
            FeatureJob(make_prompt(3), loaded, "regex"),
            FeatureJob(make_prompt(1), plain),
            FeatureJob(make_prompt(2), **kind),
        ]
    names = {"none": (None,), "one": ("all",), "mixed": ("all", None, "part", "all")}
    adapters = names[row["adapters"]] * len(jobs)
    return [replace(job, adapter=name) for job, name in zip(jobs, adapters, strict=False)]


def any_jobs(draw: random.Random) -> list[FeatureJob]:
    """Return a few jobs of any kinds and priorities."""
    return [
        replace(
            draw.choice(jobs_of(draw.choice(ROWS))),
            prompt=make_prompt(draw.randrange(4)),
            adapter=draw.choice((None, None, *ADAPTERS)),
            priority=draw.choice((-1, 0, 0, 1)),
        )
        for _ in range(draw.randint(2, 6))
    ]


def _params(row: Row) -> SamplingParams:
    if row["answers"] == "beams":
        return SamplingParams(n=3, use_beam_search=True, max_tokens=NUM_TOKENS)
    params: dict[str, Any] = {"temperature": 0.0}
    if row["sampling"] == "seeded":
        params = {"temperature": 0.8, "top_p": 0.95}
    if row["num_drafted"] and not row["structure"]:
        params["allowed_token_ids"] = FEW
    if row["answers"] == "three":
        params["n"] = 3
    return SamplingParams(max_tokens=NUM_TOKENS, logprobs=row["logprobs"], **params)
