"""Reads from a config.json what its layers are like."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tidemill_gpuworker.loading.config_fields import ConfigFields
from tidemill_gpuworker.loading.layer_config import LayerConfig, MoeConfig
from tidemill_gpuworker.loading.model_family import Experts, Family
from tidemill_gpuworker.loading.rope_settings import RopeSettings
from tidemill_gpuworker.models.rope import RopeConfig
from tidemill_gpuworker.models.temperature import Temperature

# Beyond it float32, in which rotary angles are computed, cannot tell positions apart.
_MAX_POSITIONS = 2**24
# Eight times as many as any model has; each is read on its own.
MAX_LAYERS = 1024


def max_position(config: ConfigFields) -> int:
    """Return the longest context that the model was made for."""
    return config.size("max_position_embeddings", limit=_MAX_POSITIONS)


def num_layers(config: ConfigFields) -> int:
    """Return how many layers the model has."""
    return config.size("num_hidden_layers", limit=MAX_LAYERS)


class LayerParser:
    """Reads windows, rotary embeddings and kinds of MLP, as the family says.

    Raises:
        DamagedModel: a field is missing or holds a wrong value.
        UnsupportedModel: a kind of layer or rotary embedding outside the native path.
    """

    def __init__(self, config: ConfigFields, family: Family, head_dim: int) -> None:
        self._config = config
        self._family = family
        self._head_dim = head_dim
        self._num_layers = num_layers(config)

    def parse(self) -> tuple[LayerConfig, ...]:
        """Return the layers, from the first to the last."""
        main, local = self._ropes()
        layers = []
        for index in range(self._num_layers):
            slides = self._slides(index)
            rope = (local if slides else main) if self._has_rope(index) else None
            layers.append(
                LayerConfig(
                    window=self._window() if slides else 0,
                    rope=rope,
                    is_sparse=self._is_sparse(index),
                    chunk=self._chunk(index),
                    temperature=self._temperature() if rope is None else None,
                    has_unit_norm=rope is not None and self._has_unit_norm(),
                )
            )
        return tuple(layers)

    def _window(self) -> int:
        given = self._config.values.get("sliding_window")
        return 0 if given is None else self._config.size("sliding_window")

    def _chunk(self, index: int) -> int:
        if not self._family.has_chunks:
            return 0
        kind = self._kind(index, "chunked_attention", "full_attention")
        has_size = self._config.values.get("attention_chunk_size") is not None
        is_chunked = kind == "chunked_attention" if kind else has_size and self._has_rope(index)
        return self._config.size("attention_chunk_size") if is_chunked else 0

    def _temperature(self) -> Temperature | None:
        config = self._config
        if not self._family.tempers or not config.flag("attn_temperature_tuning"):
            return None
        strength = config.positive("attn_scale", default=0.1)
        return Temperature(config.size("floor_scale", default=8192), strength)

    def _has_unit_norm(self) -> bool:
        field = self._family.unit_norm
        return bool(field) and self._config.flag(field)

    def _has_rope(self, index: int) -> bool:
        return self._family.has_rope(self._config, index)

    def _slides(self, index: int) -> bool:
        windows = self._family.windows
        kind = ""
        if windows.per_layer:
            kind = self._kind(index, "sliding_attention", "full_attention")
        if windows.switch and not self._config.flag(windows.switch):
            self._check_off(windows.switch, kind)
            return False
        return kind == "sliding_attention" if kind else windows.rule(self._config, index)

    def _check_off(self, switch: str, kind: str) -> None:
        # transformers fails on these, or slides or not by how it computes attention.
        if kind == "sliding_attention":
            raise self._config.damaged(f"layer_types has {kind!r} layers, but {switch} is not true")

    def _kind(self, index: int, *known: str) -> str:
        """Return what `layer_types` says of a layer, one of ``known``; "" if it is absent."""
        kinds = self._config.names("layer_types")
        if not kinds:
            return ""
        if len(kinds) != self._num_layers:
            raise self._config.damaged(
                f"layer_types names {len(kinds)} layers, num_hidden_layers is {self._num_layers}"
            )
        if kinds[index] not in known:
            raise self._config.unsupported(f"layers of type {kinds[index]!r} are not supported")
        return kinds[index]

    def _ropes(self) -> tuple[RopeConfig, RopeConfig]:
        """Return the rotary embeddings of full and of sliding layers."""
        config, local = self._config, self._family.local_theta
        if local is None:
            main = self._rope(config.section("rope_scaling") or self._rope_parameters())
            return main, main
        given = config.section("rope_parameters")
        if "full_attention" in given or "sliding_attention" in given:
            kinds = ConfigFields(given, config.path)
            slides = {"rope_theta": local[1], **kinds.section("sliding_attention")}
            return self._rope(kinds.section("full_attention")), self._rope(slides)
        # Older configs scale the full layers alone.
        field, default = local
        theta = config.positive(field, default=default) if field else default
        return self._rope(given | config.section("rope_scaling")), RopeConfig(theta=theta)

    def _rope_parameters(self) -> Mapping[str, Any]:
        name = "rope_parameters"
        is_given = self._config.values.get(name) is not None
        return self._config.section(name) if is_given else self._family.defaults.get(name, {})

    def _rope(self, given: Mapping[str, Any]) -> RopeConfig:
        # transformers 5 writes all settings into one object, older ones only the scaling.
        values = self._config.values
        merged = {
            "rope_theta": values.get("rope_theta", 10000.0),
            "partial_rotary_factor": values.get("partial_rotary_factor"),
            **{name: value for name, value in given.items() if value is not None},
        }
        original = "original_max_position_embeddings"
        if values.get(original) is not None:
            merged[original] = values[original]
        if not self._family.partial_rope and merged["partial_rotary_factor"] not in (None, 1.0):
            raise self._config.unsupported(
                "rotary embedding of a part of each head is not supported"
            )
        rope = RopeSettings(merged, self._config.path, max_position=max_position(self._config))
        parsed = rope.parse(self._head_dim)
        return replace(parsed, is_interleaved=self._family.interleaves_rope)

    def _is_sparse(self, index: int) -> bool:
        experts = self._family.experts
        return experts is not None and experts.is_sparse(self._config, index)


def parse_moe(config: ConfigFields, experts: Experts | None) -> MoeConfig | None:
    """Return the sizes of the sparse layers, if the family has any."""
    if experts is None:
        return None
    named = [name for name in experts.count if config.values.get(name) is not None]
    num_experts = config.size(named[0] if named else experts.count[0])
    per_token = config.size("num_experts_per_tok", limit=num_experts)
    shared = config.size(experts.shared_size) if experts.shared else 0
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        intermediate_size=config.size(experts.inner_size),
        normalises=config.switch(experts.normalises),
        shared_intermediate_size=shared,
        alpha=config.positive("swiglu_alpha", default=1.702),
        limit=config.positive("swiglu_limit", default=7.0),
    )
