"""The shape of a model, read from the config.json of a Hugging Face directory."""

from dataclasses import dataclass
from pathlib import Path

from tidemill.protocol.errors import UnsafeModel, UnsupportedModel
from tidemill_gpuworker.loading.config_fields import ConfigFields
from tidemill_gpuworker.loading.config_fields import read_config as read_config
from tidemill_gpuworker.loading.layer_config import LayerConfig, MoeConfig
from tidemill_gpuworker.loading.layer_parser import LayerParser, max_position, num_layers, parse_moe
from tidemill_gpuworker.loading.model_families import FAMILIES
from tidemill_gpuworker.loading.model_family import Family
from tidemill_gpuworker.parallel.shard import WHOLE, Shard

SUPPORTED_ARCHITECTURES = tuple(FAMILIES)
#: Names of activation functions as configs give them; `models.mlp` has the functions.
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu")


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
    #: Of a part of a model (see ``parallel.split_config``): where its layers begin, and which of
    #: all the heads and inner features, and of all the heads of keys and values, are its own.
    first_layer: int = 0
    shard: Shard = WHOLE
    kv_shard: Shard = WHOLE

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
    def attention_chunk(self) -> int:
        """Tokens of the chunks that some layers attend within; 0 if none does."""
        return max((layer.chunk for layer in self.layers), default=0)

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
    if family.experts is not None and family.experts.kind == "llama4":
        _refuse_quantised(config, architecture)
    if family.section:
        config = _section(config, family.section)
    return _Parser(config.with_defaults(family.defaults), family).parse(architecture)


def _refuse_quantised(config: ConfigFields, architecture: str) -> None:
    # Their writers take the experts apart, each in a way of its own.
    if config.section("quantization_config"):
        raise UnsupportedModel(
            f"{config.path}: quantised weights are not supported for {architecture}",
            fix="Use the unquantised model; --quantization int8, fp8 or int4 makes it smaller.",
        )


def _section(config: ConfigFields, name: str) -> ConfigFields:
    if not config.section(name):
        raise config.damaged(f"it has no {name}")
    # Older files name the dtype outside alone.
    dtypes = {key: config.values[key] for key in ("dtype", "torch_dtype") if key in config.values}
    return ConfigFields({**dtypes, **config.section(name)}, config.path)


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
        self._num_layers = num_layers(config)
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
            intermediate_size=config.size(family.inner_size),
            num_layers=self._num_layers,
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads(),
            head_dim=self._head_dim,
            max_model_len=max_position(config),
            dtype=str(values.get("dtype") or values.get("torch_dtype") or "float32"),
            layers=LayerParser(config, family, self._head_dim).parse(),
            norm_eps=config.positive(family.norm_eps, default=1e-6),
            tie_word_embeddings=config.flag("tie_word_embeddings"),
            qkv_bias=config.switch(family.qkv_bias),
            output_bias=config.switch(family.output_bias),
            mlp_bias=config.switch(family.mlp_bias),
            activation=self._activation(),
            moe=parse_moe(config, family.experts),
            first_layer=0,
            shard=WHOLE,
            kv_shard=WHOLE,
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
        if self._config.flag("use_bidirectional_attention"):
            raise self._config.unsupported("bidirectional attention is not supported")
