"""The shape of a model, read from the config.json of a Hugging Face directory."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.protocol.errors import UnsafeModel, UnsupportedModel
from tidemill_gpuworker.config_fields import ConfigFields
from tidemill_gpuworker.config_fields import read_config as read_config
from tidemill_gpuworker.model_families import FAMILIES, Family
from tidemill_gpuworker.rope import RopeConfig
from tidemill_gpuworker.rope_settings import RopeSettings

SUPPORTED_ARCHITECTURES = tuple(FAMILIES)
#: Names of activation functions as configs give them; `models.mlp` has the functions.
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu")

# Beyond it float32, in which rotary angles are computed, cannot tell positions apart.
_MAX_POSITIONS = 2**24


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer.

    Attributes:
        window: how many tokens, its own included, a token attends to; 0 for all.
        rope: the rotary embedding; None for none.
        is_sparse: whether the MLP is a mixture of experts.
    """

    window: int = 0
    rope: RopeConfig | None = None
    is_sparse: bool = False


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Sizes of a mixture of experts."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    #: Whether the weights of the chosen experts are made to add up to 1.
    normalises: bool
    #: Inner size of the expert that every token takes; 0 for none.
    shared_intermediate_size: int = 0
    #: Of the clamped activation of GPT-OSS.
    alpha: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of a decoder; all its layers have keys and values of one shape."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    #: Longest context that the model was made for.
    max_model_len: int
    #: The dtype the weights were published in: "bfloat16", "float16" or "float32".
    dtype: str
    layers: tuple[LayerConfig, ...]
    attention_scale: float
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    attention_soft_cap: float = 0.0
    final_soft_cap: float = 0.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    moe: MoeConfig | None = None

    @property
    def kv_elements_per_token(self) -> int:
        """Cache elements that one token takes: keys and values of every layer."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim

    @property
    def window(self) -> int | None:
        """The largest window if every layer has one: what lies before it is never read again."""
        windows = [layer.window for layer in self.layers]
        return max(windows) if windows and all(windows) else None

    @property
    def default_model_len(self) -> int:
        """The context that is served unless another is asked for.

        A model with two sets of rotary factors (Phi-3 with long context) gives other tokens to
        short prompts once it serves long ones, so the long set must be asked for.
        """
        limits = [
            layer.rope.original_max_position
            for layer in self.layers
            if layer.rope is not None and layer.rope.kind == "longrope"
        ]
        return min([self.max_model_len, *limits])


def load_model_config(model_dir: Path) -> ModelConfig:
    """Read and check the config of the model in ``model_dir``.

    Raises:
        ModelNotFound: there is no such directory, or it holds no config.json.
        DamagedModel: config.json cannot be read or lacks a field.
        UnsafeModel: the model asks for code of its own.
        UnsupportedModel: an architecture or feature outside the native path.
    """
    config = ConfigFields(read_config(model_dir), model_dir / "config.json")
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    return _Parser(config.with_defaults(family.defaults), family).parse(architecture)


def _architecture(config: ConfigFields) -> str:
    if config.values.get("auto_map"):
        raise UnsafeModel(
            f"{config.path} asks for code of its own (auto_map), which Tidemill never runs",
            fix=f"Choose a model of a built-in architecture: {', '.join(FAMILIES)}.",
        )
    named = config.values.get("architectures") or [config.values.get("model_type", "unknown")]
    if not isinstance(named, list):
        raise config.damaged(f"architectures must be a list of names, not {named!r}")
    architecture = str(named[0])
    if architecture not in FAMILIES:
        raise UnsupportedModel(
            f"{config.path}: {architecture} is not supported",
            fix=f"Choose one of {', '.join(FAMILIES)}.",
        )
    return architecture


class _Parser:
    """Reads the fields that a family says, and refuses what it does not have."""

    def __init__(self, config: ConfigFields, family: Family) -> None:
        self._config = config
        self._family = family
        self._num_layers = config.size("num_hidden_layers")
        self._num_heads = config.size("num_attention_heads")
        self._hidden_size = config.size("hidden_size")
        self._head_dim = self._parse_head_dim()

    def parse(self, architecture: str) -> ModelConfig:
        config, family = self._config, self._family
        self._refuse_unsupported()
        values = config.values
        return ModelConfig(
            architecture=architecture,
            vocab_size=config.size("vocab_size"),
            hidden_size=self._hidden_size,
            intermediate_size=config.size("intermediate_size"),
            num_layers=self._num_layers,
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads(),
            head_dim=self._head_dim,
            max_model_len=self._max_position(),
            dtype=str(values.get("dtype") or values.get("torch_dtype") or "float32"),
            layers=self._layers(),
            norm_eps=config.positive(family.norm_eps, default=1e-6),
            tie_word_embeddings=config.flag("tie_word_embeddings"),
            qkv_bias=self._switch(family.qkv_bias),
            output_bias=self._switch(family.output_bias),
            mlp_bias=self._switch(family.mlp_bias),
            activation=self._activation(),
            moe=self._moe(),
            **self._scalars(),
        )

    def _parse_head_dim(self) -> int:
        config, hidden_size, num_heads = self._config, self._hidden_size, self._num_heads
        if config.values.get("head_dim") is None and hidden_size % num_heads:
            raise config.damaged(
                f"hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}"
            )
        head_dim = config.size("head_dim", default=hidden_size // num_heads)
        if head_dim % 2:
            raise config.damaged(f"head_dim {head_dim} is odd, rotary embedding turns pairs")
        return head_dim

    def _num_kv_heads(self) -> int:
        count = self._config.size("num_key_value_heads", default=self._num_heads)
        if self._num_heads % count:
            raise self._config.damaged(
                f"num_attention_heads {self._num_heads} is no multiple of"
                f" num_key_value_heads {count}"
            )
        return count

    def _max_position(self) -> int:
        return self._config.size("max_position_embeddings", limit=_MAX_POSITIONS)

    def _switch(self, value: bool | str) -> bool:
        return self._config.flag(value) if isinstance(value, str) else value

    def _scalars(self) -> dict[str, float]:
        config, family = self._config, self._family
        scale = config.positive(family.query_scalar) if family.query_scalar else self._head_dim
        found = {"attention_scale": scale**-0.5}
        if family.scales_embedding:
            found["embedding_multiplier"] = self._hidden_size**0.5
        for ours, theirs in family.scalars.items():
            if config.values.get(theirs) is not None:
                found[ours] = config.positive(theirs)
        return found

    def _activation(self) -> str:
        field = self._family.activation
        named = self._config.values.get(field)
        named = "silu" if named is None else named
        named = self._family.activations.get(str(named), named)
        if named not in ACTIVATIONS:
            raise self._config.unsupported(
                f"{field} {named!r} is not supported, only {', '.join(ACTIVATIONS)}"
            )
        return str(named)

    def _refuse_unsupported(self) -> None:
        quantization = self._config.section("quantization_config")
        if quantization:
            method = quantization.get("quant_method", "unknown")
            raise UnsupportedModel(
                f"{self._config.path}: {method} quantisation is not supported",
                fix="Use the unquantised model.",
            )
        if self._config.flag("use_bidirectional_attention"):
            raise self._config.unsupported("bidirectional attention is not supported")

    def _layers(self) -> tuple[LayerConfig, ...]:
        main, local = self._ropes()
        layers = []
        for index in range(self._num_layers):
            window = self._window(index)
            rope = local if window else main
            has_rope = self._family.has_rope(self._config, index)
            layers.append(LayerConfig(window, rope if has_rope else None, self._is_sparse(index)))
        return tuple(layers)

    def _window(self, index: int) -> int:
        config, windows = self._config, self._family.windows
        if windows.switch and not config.flag(windows.switch):
            return 0
        if config.values.get("sliding_window") is None:
            return 0
        return config.size("sliding_window") if self._slides(index) else 0

    def _slides(self, index: int) -> bool:
        windows = self._family.windows
        kinds = self._config.names("layer_types") if windows.per_layer else []
        if not kinds:
            return windows.rule(self._config, index)
        if len(kinds) != self._num_layers:
            raise self._config.damaged(
                f"layer_types names {len(kinds)} layers, num_hidden_layers is {self._num_layers}"
            )
        if kinds[index] not in ("sliding_attention", "full_attention"):
            raise self._config.unsupported(f"layers of type {kinds[index]!r} are not supported")
        return kinds[index] == "sliding_attention"

    def _ropes(self) -> tuple[RopeConfig, RopeConfig]:
        """Return the rotary embeddings of full and of sliding layers."""
        config, local = self._config, self._family.local_theta
        given = config.section("rope_parameters")
        if local is None:
            main = self._rope(given | config.section("rope_scaling"))
            return main, main
        if "full_attention" in given or "sliding_attention" in given:
            kinds = ConfigFields(given, config.path)
            slides = {"rope_theta": local[1], **kinds.section("sliding_attention")}
            return self._rope(kinds.section("full_attention")), self._rope(slides)
        # Older configs scale the full layers alone.
        field, default = local
        theta = config.positive(field, default=default) if field else default
        return self._rope(given | config.section("rope_scaling")), RopeConfig(theta=theta)

    def _rope(self, given: Mapping[str, Any]) -> RopeConfig:
        # transformers 5 writes all settings into one object, older ones only the scaling.
        values = self._config.values
        settings = {"rope_theta": values.get("rope_theta", 10000.0)}
        for name in ("partial_rotary_factor", "original_max_position_embeddings"):
            settings[name] = values.get(name)
        merged = settings | {name: value for name, value in given.items() if value is not None}
        if settings["original_max_position_embeddings"] is not None:
            merged["original_max_position_embeddings"] = settings[
                "original_max_position_embeddings"
            ]
        if not self._family.partial_rope and merged["partial_rotary_factor"] not in (None, 1.0):
            raise self._config.unsupported(
                "rotary embedding of a part of each head is not supported"
            )
        rope = RopeSettings(merged, self._config.path, max_position=self._max_position())
        return rope.parse(self._head_dim)

    def _is_sparse(self, index: int) -> bool:
        if self._family.experts is None or index in self._config.counts("mlp_only_layers"):
            return False
        return (index + 1) % self._config.size("decoder_sparse_step", default=1) == 0

    def _moe(self) -> MoeConfig | None:
        config, experts = self._config, self._family.experts
        if experts is None:
            return None
        named = [name for name in experts.count if config.values.get(name) is not None]
        num_experts = config.size(named[0] if named else experts.count[0])
        per_token = config.size("num_experts_per_tok", limit=num_experts)
        shared = config.size("shared_expert_intermediate_size") if experts.shared else 0
        return MoeConfig(
            num_experts=num_experts,
            num_experts_per_token=per_token,
            intermediate_size=config.size(experts.inner_size),
            normalises=self._switch(experts.normalises),
            shared_intermediate_size=shared,
            alpha=config.positive("swiglu_alpha", default=1.702),
            limit=config.positive("swiglu_limit", default=7.0),
        )
