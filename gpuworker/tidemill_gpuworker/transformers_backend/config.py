"""The shape of a model that runs on `transformers`, and why one is refused."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tidemill.protocol.errors import DamagedModel, UnsupportedModel
from tidemill_gpuworker.loading.config_fields import ConfigFields, read_config
from tidemill_gpuworker.loading.layer_config import LayerConfig
from tidemill_gpuworker.loading.layer_parser import MAX_LAYERS
from tidemill_gpuworker.loading.model_config import ModelConfig
from tidemill_gpuworker.loading.model_task import architecture_of, refuse_own_code
from tidemill_gpuworker.parallel.shard import EVERYTHING, Place, Shard
from tidemill_gpuworker.parallel.split_config import indivisible
from tidemill_gpuworker.transformers_backend.split import (
    DryRanks,
    split_model,
    splits_attention,
    styles_of,
)
from tidemill_gpuworker.transformers_backend.survey import NO_INTERFACE, Survey, Unsuited, survey

#: What families call the number of their layers.
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_FIX = "Choose a model whose layers all attend to earlier tokens and keep no other state."


class TransformersConfig:
    """A model directory as `transformers` reads it, with nothing loaded yet.

    Raises:
        ModelNotFound, DamagedModel: there is no readable config.json.
        UnsafeModel: the model asks for code of its own.
        UnsupportedModel: it cannot run over a paged cache; the message says why.
    """

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        raw = read_config(model_dir)
        refuse_own_code(raw, model_dir / "config.json")
        self.architecture = architecture_of(raw)
        _check_num_layers(ConfigFields(raw, model_dir / "config.json"))
        config = self.load()
        self.model_class = self._find_class(config)
        self._refuse(config)
        self._max_model_len = self._context(config)
        self.survey = self._survey()
        self.model_config = self._model_config(config)
        self._parts: dict[Place, ModelConfig] = {EVERYTHING: self.model_config}

    def split(self, place: Place) -> ModelConfig:
        """Return the shape of a part of the model.

        Raises:
            ConfigError: its sizes are no multiples of the number of parts.
            UnsupportedModel: `transformers` has no plan for splitting it, or it has no stages.
        """
        if place not in self._parts:
            self._parts[place] = self._split(place)
        return self._parts[place]

    def _split(self, place: Place) -> ModelConfig:
        if not place.stage.is_whole:
            raise UnsupportedModel(
                f"{self.architecture} runs on transformers, which has no pipeline stages",
                fix="Leave out --pipeline-parallel-size; --tensor-parallel-size splits its layers.",
            )
        try:
            first = self._survey_part(place.tensor).layers[0]
        except Unsuited as error:
            raise UnsupportedModel(
                f"{self.architecture} cannot be split over several ranks: {error}",
                fix="Leave out --tensor-parallel-size.",
            ) from error
        return replace(
            self.model_config,
            num_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            shard=place.tensor,
        )

    def _survey_part(self, shard: Shard) -> Survey:
        def prepare(model: PreTrainedModel) -> None:
            styles = styles_of(model, model.get_output_embeddings())
            layer = self.survey.layers[0]
            if splits_attention(styles, layer.name):
                sizes = {
                    "num_attention_heads": layer.num_heads,
                    "num_key_value_heads": layer.num_kv_heads,
                }
                for name, size in sizes.items():
                    if size % shard.count:
                        raise indivisible(name, size, shard.count)
            split_model(model, shard, DryRanks(shard.count))

        return survey(self.model_class, self.load(), self._max_model_len, prepare)

    def load(self) -> PretrainedConfig:
        """Return a new config object; `transformers` changes those it is given."""
        try:
            return AutoConfig.from_pretrained(
                self.model_dir, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # each class of config checks its fields with errors of its own
            raise self._unsupported(f"transformers cannot read it: {error}") from error

    def _find_class(self, config: PretrainedConfig) -> type[PreTrainedModel]:
        found: type[PreTrainedModel] | None = None
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        if found is None or found.__name__ != self.architecture:
            raise self._unsupported("it is not a causal language model of transformers")
        return found

    def _refuse(self, config: PretrainedConfig) -> None:
        if getattr(config, "quantization_config", None):
            raise UnsupportedModel(
                f"{self.model_dir / 'config.json'}: quantised weights are not supported for"
                f" {self.architecture}",
                fix="Use the unquantised model.",
            )
        reason = _why_unsuited(self.model_class, config)
        if reason:
            raise self._unsupported(reason)

    def _context(self, config: PretrainedConfig) -> int:
        limit = getattr(config, "max_position_embeddings", None)
        if not isinstance(limit, int) or limit < 1:
            raise self._unsupported("its config names no max_position_embeddings")
        # Longer contexts use other rotary factors, with which the keys of shorter ones do not go.
        original = [limit, *(_original_limits(config))]
        return min(original)

    def _survey(self) -> Survey:
        try:
            found = survey(self.model_class, self.load(), self._max_model_len)
        except Unsuited as error:
            raise self._unsupported(str(error)) from error
        return found

    def _model_config(self, config: PretrainedConfig) -> ModelConfig:
        layers = self.survey.layers
        if len(layers) != config.num_hidden_layers:
            raise self._unsupported(
                f"it computes attention {len(layers)} times in {config.num_hidden_layers} layers"
            )
        shapes = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
        if len(shapes) > 1:
            raise self._unsupported("its layers differ in the number or width of heads")
        first = layers[0]
        if first.value_dim > first.head_dim:
            raise self._unsupported("its values are wider than its keys")
        return ModelConfig(
            architecture=self.architecture,
            vocab_size=self.survey.vocab_size,
            hidden_size=self._size(config, "hidden_size"),
            intermediate_size=getattr(config, "intermediate_size", None) or 0,
            num_layers=len(layers),
            num_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            max_model_len=self._max_model_len,
            dtype=str(config.dtype or "float32").removeprefix("torch."),
            layers=tuple(LayerConfig(window=layer.window) for layer in layers),
            attention_scale=first.scale,
        )

    def _size(self, config: PretrainedConfig, field: str) -> int:
        value = getattr(config, field, None)
        if not isinstance(value, int) or value < 1:
            path = self.model_dir / "config.json"
            raise DamagedModel(f"{path}: {field} is {value!r}", fix="Download it again.")
        return value

    def _unsupported(self, reason: str) -> UnsupportedModel:
        reason = " ".join(reason.split())
        path = self.model_dir / "config.json"
        return UnsupportedModel(f"{path}: {self.architecture} is not supported: {reason}", fix=_FIX)


def _check_num_layers(config: ConfigFields) -> None:
    # Before transformers makes as many.
    for name in _NUM_LAYERS:
        if config.values.get(name) is not None:
            config.size(name, limit=MAX_LAYERS)


def _why_unsuited(model_class: type[PreTrainedModel], config: PretrainedConfig) -> str:
    """Return what class and config of a model say against a paged cache; "" if nothing."""
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if kinds:
        return f"layers of type {', '.join(sorted(kinds))}"
    if getattr(config, "attn_temperature_tuning", False):
        # Which is wrong where a step's tokens are a row of several sequences.
        return "it counts the positions that its queries grow with (attn_temperature_tuning)"
    if model_class._is_stateful:
        return "it keeps a recurrent state beside its keys and values"
    if getattr(config, "num_kv_shared_layers", 0):
        return "its layers share keys and values"
    if getattr(config, "is_encoder_decoder", False):
        return "it attends to an encoder"
    if not model_class._can_set_attn_implementation():
        return NO_INTERFACE
    if any(section.get("rope_type") == "dynamic" for section in _rope_sections(config)):
        return "rotary factors that change with every token (dynamic)"
    return ""


def _original_limits(config: PretrainedConfig) -> list[int]:
    limits = []
    for section in _rope_sections(config):
        if section.get("rope_type") == "longrope":
            original = section.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limits += [original] if isinstance(original, int) else []
    return limits


def _rope_sections(config: PretrainedConfig) -> Iterator[Mapping[str, Any]]:
    given = getattr(config, "rope_parameters", None) or {}
    nested = [section for section in given.values() if isinstance(section, Mapping)]
    yield from nested or [given]
