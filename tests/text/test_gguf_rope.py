"""How a GGUF file stretches a context becomes what config.json would say of it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tidemill_gpuworker.loading.gguf_rope import rope_scaling, rotated_share
from tidemill_gpuworker.loading.rope_settings import RopeSettings

HEAD_DIM, CONTEXT, THETA = 64, 131072, 500000.0


def read(architecture: str, fields: dict[str, Any], **tensors: list[float]) -> dict[str, Any]:
    known = {f"{architecture}.{name}": value for name, value in fields.items()}
    known["general.architecture"] = architecture
    return rope_scaling(known.get, {f"{name}.weight": t for name, t in tensors.items()}.get)


def frequencies(settings: dict[str, Any]) -> tuple[torch.Tensor, float]:
    values = {"rope_theta": THETA} | settings
    rope = RopeSettings(values, Path("config.json"), max_position=CONTEXT).parse(HEAD_DIM)
    return rope.inverse_frequencies(HEAD_DIM), rope.amplitude


def expected(settings: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """As transformers computes them."""
    config = LlamaConfig(
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": THETA, **settings},
    )
    found, amplitude = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, torch.device("cpu"))
    return found, amplitude


def llama3_divisors(factor: float, low: float, high: float, original: int) -> list[float]:
    """As llama.cpp's converter writes them: each in float64, by the paper's rule."""
    divisors = []
    for pair in range(HEAD_DIM // 2):
        rotations = original / (2 * math.pi * THETA ** (2 * pair / HEAD_DIM))
        share = min(max((rotations - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - share) / factor + share))
    return divisors


def test_divisors_of_frequencies_are_those_of_llama3() -> None:
    found = read(
        "llama", {"context_length": CONTEXT}, rope_freqs=llama3_divisors(8.0, 1.0, 4.0, 8192)
    )
    wanted = expected(
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    )
    torch.testing.assert_close(frequencies(found), wanted)


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32768},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
        ({"type": "none"}, {"rope_type": "default"}),
        ({}, {"rope_type": "default"}),
    ],
)
def test_fields_are_read_as_the_settings_of_the_same_name(
    fields: dict[str, Any], settings: dict[str, Any]
) -> None:
    found = read("qwen2", {f"rope.scaling.{name}": value for name, value in fields.items()})
    assert found == ({} if settings["rope_type"] == "default" else settings)


def test_longrope_has_its_lists_and_its_amplitude() -> None:
    short, long = [1.5] * (HEAD_DIM // 2), [4.0] * (HEAD_DIM // 2)
    fields = {"rope.scaling.original_context_length": 4096, "rope.scaling.attn_factor": 1.19}
    found = read("phi3", fields, rope_factors_short=short, rope_factors_long=long)
    assert found == {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.19,
    }


def test_divisors_of_another_family_are_left_to_its_config() -> None:
    assert read("gemma4", {"context_length": 64}, rope_freqs=[1e30] * 8) == {}


@pytest.mark.parametrize(
    ("architecture", "rotated", "share"),
    [("phi3", 96, 0.75), ("phi3", 128, 1.0), ("stablelm", 32, 0.25)],
)
def test_the_rotated_part_of_a_head_is_that_of_the_file(
    architecture: str, rotated: int, share: float
) -> None:
    sizes = {"rope.dimension_count": rotated, "embedding_length": 3072, "attention.head_count": 24}
    known: dict[str, Any] = {f"{architecture}.{name}": size for name, size in sizes.items()}
    found = rotated_share((known | {"general.architecture": architecture}).get)
    assert found == {"partial_rotary_factor": share}


def test_a_family_that_rotates_whole_heads_keeps_its_settings() -> None:
    known: dict[str, Any] = {"general.architecture": "llama", "llama.rope.dimension_count": 64}
    assert rotated_share(known.get) == {}
