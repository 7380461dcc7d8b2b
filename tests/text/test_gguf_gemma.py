"""A GGUF file of Gemma scales its queries as the published config.json of its model says."""

import pytest
from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig

from tidemill_gpuworker.loading.gguf_gemma import scale_queries


@pytest.mark.parametrize(
    ("family", "layers", "hidden", "heads", "head_dim", "published"),
    [
        (Gemma2Config, 26, 2304, 8, 256, 256),
        (Gemma2Config, 42, 3584, 16, 256, 256),
        (Gemma2Config, 46, 4608, 32, 128, 144),
        (Gemma3TextConfig, 26, 1152, 4, 256, 256),
        (Gemma3TextConfig, 48, 3840, 16, 256, 256),
        (Gemma3TextConfig, 62, 5376, 32, 128, 168),
    ],
)
def test_queries_are_scaled_as_published(
    family: type[Gemma2Config | Gemma3TextConfig],
    layers: int,
    hidden: int,
    heads: int,
    head_dim: int,
    published: int,
) -> None:
    config = family(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        head_dim=head_dim,
    )
    scale_queries(config)
    assert config.query_pre_attn_scalar == published


def test_other_families_have_no_scalar() -> None:
    config = LlamaConfig(num_hidden_layers=46)
    scale_queries(config)
    assert not hasattr(config, "query_pre_attn_scalar")
