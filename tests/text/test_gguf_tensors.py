"""Every tensor of a GGUF file has a place in the model, or the file is refused."""

from typing import Any

import pytest
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES

from tidemill_gpuworker.loading.gguf_tensors import known_tensors, unused_tensors

SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
    "pad_token_id": 0,
}


def known(architecture: str, model_type: str, **more: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **(SIZES | more))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return known_tensors(model, architecture)


def written(arch: MODEL_ARCH) -> list[str]:
    """Weights of one layer that llama.cpp's converter may write."""
    return [f"{TENSOR_NAMES[tensor].format(bid=0)}.weight" for tensor in MODEL_TENSORS[arch]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "model_type"),
    [
        (MODEL_ARCH.QWEN2, "qwen2"),
        (MODEL_ARCH.QWEN3, "qwen3"),
        (MODEL_ARCH.QWEN3MOE, "qwen3_moe"),
        (MODEL_ARCH.GEMMA3, "gemma3_text"),
    ],
)
def test_what_the_converter_writes_has_its_place(arch: MODEL_ARCH, model_type: str) -> None:
    places = known(MODEL_ARCH_NAMES[arch], model_type)
    assert unused_tensors(written(arch), places) == []


@pytest.mark.slow
def test_the_experts_of_a_dense_llama_have_no_place() -> None:
    found = unused_tensors(written(MODEL_ARCH.LLAMA), known("llama", "llama"))
    experts = ["ffn_down_exps", "ffn_gate_exps", "ffn_gate_inp", "ffn_up_exps"]
    assert found == [f"blk.0.{name}.weight" for name in experts]


@pytest.mark.slow
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_bias_has_a_place_where_the_model_has_one(has_bias: bool) -> None:
    names = [f"blk.0.attn_{part}.bias" for part in ("k", "output", "q", "v")]
    places = known("llama", "llama", attention_bias=has_bias)
    assert unused_tensors(names, places) == ([] if has_bias else names)


def test_only_what_the_model_has_no_place_for_is_named() -> None:
    known = {"blk.0.attn_q.weight", "blk.0.ffn_up_exps"}
    names = ["blk.0.ffn_up_exps.weight", "blk.0.attn_q.weight", "blk.0.attn_q.bias", "a.weight"]
    assert unused_tensors(names, known) == ["a.weight", "blk.0.attn_q.bias"]


def test_what_rope_is_made_of_is_read_elsewhere() -> None:
    names = [f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short")]
    assert unused_tensors([*names, "blk.0.attn_rot_embd.weight"], ()) == []


@pytest.mark.slow
def test_the_newer_reader_says_itself_what_is_left_over() -> None:
    assert known("lfm2", "lfm2") is None
