"""Small quantised checkpoints, beside the plain models that they stand for."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers

from support import quantisers
from support.quantisers import Quantiser

VOCAB_SIZE = 512

_GPTQ = {"quant_method": "gptq", "lm_head": False}
_AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["lm_head"],
}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "modules_to_not_convert": ["lm_head"]}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}


@dataclass(frozen=True)
class QuantisedFormat:
    """A quantiser and what config.json says of its output; layers in ``plain`` stay as they are."""

    quantiser: Quantiser
    config: dict[str, Any]
    plain: tuple[str, ...] = field(default=("lm_head",))


def _compressed(layout: str, weights: dict[str, Any], **changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **changes,
    }


def _gptq(bits: int, group_size: int, *, symmetric: bool, **options: Any) -> QuantisedFormat:
    version = options.get("version", 1)
    config = _GPTQ | {
        "bits": bits,
        "group_size": group_size,
        "sym": symmetric,
        "desc_act": options.get("act_order", False),
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    return QuantisedFormat(
        quantisers.gptq(bits, group_size, symmetric=symmetric, **options), config
    )


def _packed(weights: dict[str, Any], *, act_order: bool = False) -> QuantisedFormat:
    quantiser = quantisers.pack_quantized(
        weights["num_bits"],
        weights.get("group_size") or -1,
        symmetric=weights["symmetric"],
        act_order=act_order,
    )
    actorder = {"actorder": "group"} if act_order else {}
    return QuantisedFormat(quantiser, _compressed("pack-quantized", weights | actorder))


_CHANNEL = {"strategy": "channel", "group_size": None}
FORMATS: dict[str, QuantisedFormat] = {
    "gptq v1": _gptq(4, 64, symmetric=False),
    "gptq v1 symmetric": _gptq(4, 32, symmetric=True),
    "gptq v1 one group": _gptq(4, -1, symmetric=True),
    "gptq v1 8 bits": _gptq(8, 64, symmetric=False),
    "gptq v1 2 bits": _gptq(2, 32, symmetric=False),
    "gptq v2": _gptq(4, 64, symmetric=False, version=2),
    "gptq desc_act": _gptq(4, 64, symmetric=False, act_order=True),
    "gptq desc_act 8 bits": _gptq(8, 32, symmetric=True, act_order=True),
    "awq": QuantisedFormat(quantisers.awq(64), _AWQ | {"group_size": 64}),
    "awq a plain layer": QuantisedFormat(
        quantisers.awq(32),
        _AWQ | {"group_size": 32, "modules_to_not_convert": ["model.layers.0", "v_proj"]},
        plain=("lm_head", "model.layers.0", "v_proj"),
    ),
    "fp8 one scale": QuantisedFormat(
        quantisers.fp8_rows(per_tensor=True, static=True), _FP8 | {"activation_scheme": "static"}
    ),
    "fp8 blocks": QuantisedFormat(
        quantisers.fp8_blocks("weight_scale_inv"),
        _FP8 | {"activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "fbgemm fp8": QuantisedFormat(
        quantisers.fp8_rows(per_tensor=False, static=False),
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
    ),
    "compressed fp8 dynamic": QuantisedFormat(
        quantisers.fp8_rows(per_tensor=False, static=False),
        _compressed("float-quantized", _FLOAT8 | {"strategy": "channel"}),
    ),
    "compressed fp8 blocks": QuantisedFormat(
        quantisers.fp8_blocks("weight_scale"),
        _compressed(
            "float-quantized", _FLOAT8 | {"strategy": "block", "block_structure": [128, 128]}
        ),
    ),
    "compressed int8": QuantisedFormat(
        quantisers.int8_rows,
        _compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    ),
    "compressed w4a16": _packed(_INT4),
    "compressed w4a16 asymmetric": _packed(_INT4 | {"symmetric": False}),
    "compressed w4a16 channels": _packed(_INT4 | _CHANNEL),
    "compressed w8a16 act order": _packed(_INT4 | {"num_bits": 8}, act_order=True),
    "compressed some layers": QuantisedFormat(
        quantisers.int8_rows,
        _compressed(
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "channel"},
            ignore=["lm_head", "re:.*self_attn.*", "model.layers.1.mlp.down_proj"],
        ),
        plain=("lm_head", "self_attn", "model.layers.1.mlp.down_proj"),
    ),
    "compressed nvfp4": QuantisedFormat(
        quantisers.float4(16, nvidia=True),
        _compressed(
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        ),
    ),
    "compressed mxfp4": QuantisedFormat(
        quantisers.float4(32, nvidia=False),
        _compressed(
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        ),
    ),
    "squeezellm": QuantisedFormat(
        quantisers.squeezellm(sparse=False), {"quant_method": "squeezellm", "wbits": 4}
    ),
    "squeezellm sparse": QuantisedFormat(
        quantisers.squeezellm(sparse=True), {"quant_method": "squeezellm", "wbits": 4}
    ),
    "bitsandbytes int8": QuantisedFormat(
        quantisers.bitsandbytes_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}
    ),
    "bitsandbytes nf4": QuantisedFormat(
        quantisers.bitsandbytes_nf4(nested=False),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "bitsandbytes nf4 nested": QuantisedFormat(
        quantisers.bitsandbytes_nf4(nested=True),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
}


#: Formats whose groups are of inputs that are no neighbours.
ACT_ORDER = ("gptq desc_act", "gptq desc_act 8 bits", "compressed w8a16 act order")


def make_plain_model() -> transformers.PreTrainedModel:
    """Return a random Llama in float32 whose layers are no multiples of 128 throughout."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
    )
    return transformers.LlamaForCausalLM(config).eval()


def write_quantised(name: str, directory: Path) -> transformers.PreTrainedModel:
    """Write the model in the format of that name; return the plain model that it stands for."""
    model = make_plain_model()
    quantise(model, FORMATS[name], directory)
    return model


def quantise(model: transformers.PreTrainedModel, to: QuantisedFormat, directory: Path) -> None:
    """Write a Llama to ``directory``, without a tokenizer, and make it what was written."""
    stored: dict[str, torch.Tensor] = {}
    plain = model.state_dict()
    if model.config.tie_word_embeddings:
        del plain["lm_head.weight"]
    for key, value in list(plain.items()):
        layer = key.removesuffix(".weight")
        is_quantised = value.dim() == 2 and ".layers." in key
        if not is_quantised or any(f".{part}." in f".{layer}." for part in to.plain):
            stored[key] = value.clone()
            continue
        made = to.quantiser(value)
        stored |= {f"{layer}.{suffix}": tensor for suffix, tensor in made.tensors.items()}
        plain[key] = made.plain
    model.load_state_dict(plain, strict=not model.config.tie_word_embeddings)
    model.config.save_pretrained(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "quantization_config": to.config}
    path.write_text(json.dumps(config))
    stored = {key: value.contiguous() for key, value in stored.items()}
    safetensors.torch.save_file(stored, directory / "model.safetensors", {"format": "pt"})
