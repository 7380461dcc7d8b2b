"""The shape of a model, read from the config.json of a Hugging Face directory."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.protocol.errors import DamagedModel, ModelNotFound, UnsafeModel, UnsupportedModel
from tidemill_gpuworker.rope import DEFAULT_THETA, RopeConfig, is_positive_number, parse_rope


@dataclass(frozen=True, slots=True)
class _Family:
    """Where an architecture of the Llama family departs from Llama."""

    qkv_bias: bool | None = None  # None: as `attention_bias` in the config says
    output_bias: bool | None = None
    qk_norm: bool = False
    head_dim: int | None = None  # where the config gives none; None: hidden size / heads
    #: Whether `sliding_window` counts: "never", "if_enabled" (by `use_sliding_window`), "always".
    window: str = "never"


_FAMILIES = {
    "LlamaForCausalLM": _Family(),
    "MistralForCausalLM": _Family(qkv_bias=False, output_bias=False, window="always"),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, output_bias=False, window="if_enabled"),
    "Qwen3ForCausalLM": _Family(qk_norm=True, head_dim=128, window="if_enabled"),
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)

# The sizes of tensors are counted in 32 bits by the kernels.
_MAX_SIZE = 2**31 - 1
# Beyond it float32, in which rotary angles are computed, cannot tell positions apart.
_MAX_POSITIONS = 2**24


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of a decoder of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    #: Longest context that the model was made for and that Tidemill runs exactly.
    max_model_len: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    #: The dtype the weights were published in: "bfloat16", "float16" or "float32".
    dtype: str

    @property
    def kv_elements_per_token(self) -> int:
        """Cache elements that one token takes: keys and values of every layer."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim


def load_model_config(model_dir: Path) -> ModelConfig:
    """Read and check the config of the model in ``model_dir``.

    Raises:
        ModelNotFound: there is no such directory, or it holds no config.json.
        DamagedModel: config.json cannot be read or lacks a field.
        UnsafeModel: the model asks for code of its own.
        UnsupportedModel: an architecture or feature outside the Llama family.
    """
    config = _Fields(read_config(model_dir), model_dir / "config.json")
    architecture = _architecture(config)
    return _parse(config, architecture, _FAMILIES[architecture])


def read_config(model_dir: Path) -> Mapping[str, Any]:
    """Return the parsed config.json; raises as `load_model_config` does."""
    path = model_dir / "config.json"
    if not model_dir.is_dir():
        raise ModelNotFound(f"no model directory {model_dir}", fix="Check the path.")
    if not path.is_file():
        raise ModelNotFound(
            f"{model_dir} holds no config.json", fix="Give a Hugging Face model directory."
        )
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise DamagedModel(
            f"{path} cannot be read: {error}", fix="Check its permissions."
        ) from error
    except (ValueError, RecursionError) as error:
        raise DamagedModel(f"{path} is not JSON: {error}", fix="Download it again.") from error
    if not isinstance(config, dict):
        raise DamagedModel(f"{path} is not a JSON object", fix="Download it again.")
    return config


class _Fields:
    """Typed access to a config.json; complaints name the file and the field."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def size(self, name: str, default: int | None = None, *, limit: int = _MAX_SIZE) -> int:
        """Return an integer from 1 to ``limit``."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
            raise self.damaged(f"{name} must be an integer from 1 to {limit}, not {value!r}")
        return value

    def positive(self, name: str, default: float) -> float:
        """Return a positive number."""
        value = self.values.get(name, default)
        if not is_positive_number(value):
            raise self.damaged(f"{name} must be a positive number, not {value!r}")
        return float(value)

    def flag(self, name: str) -> bool:
        """Return a boolean that is off unless given."""
        value = self.values.get(name)
        if not isinstance(value, bool | None):
            raise self.damaged(f"{name} must be true or false, not {value!r}")
        return bool(value)

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a nested object, empty unless given."""
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            raise self.damaged(f"{name} must be an object, not {value!r}")
        return value

    def damaged(self, reason: str) -> DamagedModel:
        """Return the error for a wrong or missing value."""
        return DamagedModel(f"{self.path}: {reason}", fix="Download config.json again.")


def _architecture(config: _Fields) -> str:
    if config.values.get("auto_map"):
        raise UnsafeModel(
            f"{config.path} asks for code of its own (auto_map), which Tidemill never runs",
            fix=f"Choose a model of a built-in architecture: {', '.join(_FAMILIES)}.",
        )
    named = config.values.get("architectures") or [config.values.get("model_type", "unknown")]
    if not isinstance(named, list):
        raise config.damaged(f"architectures must be a list of names, not {named!r}")
    architecture = str(named[0])
    if architecture not in _FAMILIES:
        raise UnsupportedModel(
            f"{config.path}: {architecture} is not supported",
            fix=f"Choose one of {', '.join(_FAMILIES)}.",
        )
    return architecture


def _parse(config: _Fields, architecture: str, family: _Family) -> ModelConfig:
    _refuse_unsupported(config)
    num_heads = config.size("num_attention_heads")
    num_kv_heads = config.size("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise config.damaged(
            f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    hidden_size = config.size("hidden_size")
    attention_bias = config.flag("attention_bias")
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.size("intermediate_size"),
        num_layers=config.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, family, hidden_size, num_heads),
        rms_norm_eps=config.positive("rms_norm_eps", default=1e-6),
        max_model_len=_max_model_len(config, family),
        rope=_rope(config),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=config.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        dtype=str(config.values.get("dtype") or config.values.get("torch_dtype") or "float32"),
    )


def _head_dim(config: _Fields, family: _Family, hidden_size: int, num_heads: int) -> int:
    if (
        family.head_dim is None
        and config.values.get("head_dim") is None
        and hidden_size % num_heads
    ):
        raise config.damaged(
            f"hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}"
        )
    head_dim = config.size("head_dim", default=family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise config.damaged(f"head_dim {head_dim} is odd, rotary embedding turns pairs")
    return head_dim


def _rope(config: _Fields) -> RopeConfig:
    # transformers 5 writes all settings into `rope_parameters`, older ones only the scaling.
    settings = {
        "rope_theta": config.values.get("rope_theta", DEFAULT_THETA),
        "partial_rotary_factor": config.values.get("partial_rotary_factor", 1.0),
    }
    return parse_rope(
        settings | {**config.section("rope_scaling"), **config.section("rope_parameters")},
        config.path,
    )


def _refuse_unsupported(config: _Fields) -> None:
    quantization = config.section("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown")
        raise UnsupportedModel(
            f"{config.path}: {method} quantisation is not supported",
            fix="Use the unquantised model.",
        )
    activation = config.values.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(
            f"{config.path}: hidden_act {activation!r} is not supported, only 'silu'",
            fix="Choose another model.",
        )


def _max_model_len(config: _Fields, family: _Family) -> int:
    # Within its window a sliding-window layer is plain causal attention, so a context that is no
    # longer than the window is exact without window support.
    longest = config.size("max_position_embeddings", limit=_MAX_POSITIONS)
    enabled = family.window == "always" or config.flag("use_sliding_window")
    if family.window == "never" or not enabled or config.values.get("sliding_window") is None:
        return longest
    return min(longest, config.size("sliding_window"))
