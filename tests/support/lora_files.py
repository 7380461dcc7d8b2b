"""Adapters as PEFT writes them, with random weights, and models that they are merged into."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers

_PREFIX = "base_model.model."
_CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "modules_to_save": None,
    "use_dora": False,
    "use_rslora": False,
}


def write_adapter(
    directory: Path,
    model: transformers.PreTrainedModel,
    modules: tuple[str, ...],
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    only: Callable[[str], bool] = lambda name: True,
    **config: Any,
) -> Path:
    """Write an adapter of the linear layers whose names end in ``modules``."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.endswith(modules) and only(name):
            down = torch.randn(rank, layer.in_features, generator=generator) * 0.1
            up = torch.randn(layer.out_features, rank, generator=generator) * 0.1
            tensors[f"{_PREFIX}{name}.lora_A.weight"] = down
            tensors[f"{_PREFIX}{name}.lora_B.weight"] = up
    assert tensors, f"the model has none of {modules}"
    safetensors.torch.save_file(tensors, directory / "adapter_model.safetensors")
    values = {**_CONFIG, "r": rank, "lora_alpha": alpha, "target_modules": list(modules), **config}
    (directory / "adapter_config.json").write_text(json.dumps(values))
    return directory


@torch.no_grad()
def merged(
    model: transformers.PreTrainedModel, directory: Path, scale: float
) -> transformers.PreTrainedModel:
    """Return the model with W + scale B A in place of W, summed in float64."""
    result = copy.deepcopy(model)
    tensors = safetensors.torch.load_file(directory / "adapter_model.safetensors")
    layers = dict(result.named_modules())
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            change = tensors[f"{module}.lora_B.weight"].double() @ down.double()
            weight = layers[module.removeprefix(_PREFIX)].weight
            weight.copy_(weight.double() + scale * change)
    return result
