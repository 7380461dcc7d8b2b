"""Single parts of the model against float64 and transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from support.tiny_models import CONFIGS, make_tiny_model
from tidemill_gpuworker.loading.rope_settings import RopeSettings
from tidemill_gpuworker.models.linear import PackedLinear, PlainLinear, can_pack, make_linear
from tidemill_gpuworker.models.rope import RopeConfig

LLAMA3 = CONFIGS["llama3-rope"][1]["rope_parameters"]


def transformers_frequencies(kind: str) -> torch.Tensor:
    """The inverse frequencies that transformers gives heads of 16 dimensions."""
    if kind == "default":
        frequencies: torch.Tensor = make_tiny_model("llama-tied").model.rotary_emb.inv_freq
        return frequencies
    config = transformers.LlamaConfig(
        head_dim=16, rope_parameters=CONFIGS[f"{kind}-rope"][1]["rope_parameters"]
    )
    scaled: torch.Tensor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0]
    return scaled


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(),
        RopeConfig(kind="linear", factor=4.0),
        RopeConfig(
            kind="llama3",
            factor=LLAMA3["factor"],
            low_freq_factor=LLAMA3["low_freq_factor"],
            high_freq_factor=LLAMA3["high_freq_factor"],
            original_max_position=LLAMA3["original_max_position_embeddings"],
        ),
    ],
    ids=lambda rope: rope.kind,
)
def test_rope_frequencies_are_bit_for_bit_those_of_transformers(rope: RopeConfig) -> None:
    assert torch.equal(rope.inverse_frequencies(16), transformers_frequencies(rope.kind))


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "yarn", "factor": 32.0, "truncate": False, "beta_fast": 16.0},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.9},
        {"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 128}
        | {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0] * 8},
    ],
    ids=lambda settings: " ".join(str(value) for value in settings.values())[:30],
)
def test_stretched_frequencies_and_amplitude_are_those_of_transformers(
    settings: dict[str, Any],
) -> None:
    given = {"rope_theta": 10000.0} | settings
    config = transformers.LlamaConfig(
        head_dim=16, max_position_embeddings=1024, rope_parameters=dict(given)
    )
    kind = settings["rope_type"]
    for is_long in {False, kind == "longrope"}:
        frequencies, amplitude = ROPE_INIT_FUNCTIONS[kind](
            config, torch.device("cpu"), seq_len=1024 if is_long else 100
        )
        rope = RopeSettings(given, Path("config.json"), max_position=1024).parse(16)
        rope = rope.for_context(1024 if is_long else 100)
        assert torch.equal(rope.inverse_frequencies(16), frequencies)
        assert rope.amplitude == pytest.approx(amplitude, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 32, 257])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_product_rounds_no_worse_than_torch(
    dtype: torch.dtype, rows: int, with_bias: bool
) -> None:
    if not can_pack(dtype):
        pytest.skip(f"this CPU has no {dtype} products")
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 72, generator=generator).to(dtype)
    weight = torch.randn(100, 72, generator=generator).to(dtype)
    bias = torch.randn(100, generator=generator).to(dtype) if with_bias else None
    exact = x.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)

    packed = (PackedLinear(weight, bias)(x).double() - exact).norm()
    plain = (PlainLinear(weight, bias)(x).double() - exact).norm()

    assert packed <= 1.5 * plain + 1e-6 * exact.norm()


def test_a_dtype_without_packed_products_gets_the_plain_one() -> None:
    assert isinstance(make_linear(torch.eye(4, dtype=torch.float64)), PlainLinear)
