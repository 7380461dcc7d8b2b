"""The rotary embedding that a config.json asks for."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tidemill.protocol.errors import DamagedModel, UnsupportedModel
from tidemill_gpuworker.models.rope import RopeConfig, is_positive_number

_FIX = "Download config.json again."
_SUPPORTED = ("default", "linear", "llama3", "yarn", "longrope")


class RopeSettings:
    """The rope settings of a config.json, which is named in complaints.

    Args:
        values: the settings as transformers 5 writes them, in one object.
        path: of config.json.
        max_position: the model's ``max_position_embeddings``.
    """

    def __init__(self, values: Mapping[str, Any], path: Path, *, max_position: int) -> None:
        self._values = values
        self._path = path
        self._max_position = max_position

    def parse(self, head_dim: int) -> RopeConfig:
        """Return the checked settings.

        Raises:
            UnsupportedModel: a kind of scaling that Tidemill does not have.
            DamagedModel: a setting is missing or no positive number, or there are no frequencies of
                such settings.
        """
        rope = self._parse(head_dim)
        self._check_frequencies(rope, head_dim)
        return rope

    def _parse(self, head_dim: int) -> RopeConfig:
        # Old checkpoints of Phi-3 call longrope "su".
        kind = str(self._values.get("rope_type") or self._values.get("type") or "default")
        kind = "longrope" if kind == "su" else kind
        if kind not in _SUPPORTED:
            raise UnsupportedModel(
                f"{self._path}: rope scaling {kind!r} is not supported, only"
                f" {', '.join(_SUPPORTED)}",
                fix="Choose another model.",
            )
        rope = RopeConfig(theta=self._positive("rope_theta"), kind=kind, share=self._share())
        match kind:
            case "linear":
                return replace(rope, factor=self._positive("factor"))
            case "llama3":
                return self._llama3(rope)
            case "yarn":
                return self._yarn(rope)
            case "longrope":
                return self._longrope(rope, rope.rotary_dim(head_dim) // 2)
        return rope

    def _check_frequencies(self, rope: RopeConfig, head_dim: int) -> None:
        ropes = [rope, replace(rope, is_long=True)] if rope.kind == "longrope" else [rope]
        try:
            are_finite = all(each.inverse_frequencies(head_dim).isfinite().all() for each in ropes)
        except (ArithmeticError, ValueError):
            are_finite = False
        if not are_finite:
            raise DamagedModel(
                f"{self._path}: there is no rotary embedding of the rope settings"
                f" {dict(self._values)!r}",
                fix=_FIX,
            )

    def _llama3(self, rope: RopeConfig) -> RopeConfig:
        return replace(
            rope,
            factor=self._positive("factor"),
            low_freq_factor=self._positive("low_freq_factor"),
            high_freq_factor=self._positive("high_freq_factor"),
            original_max_position=self._original(),
        )

    def _yarn(self, rope: RopeConfig) -> RopeConfig:
        if rope.theta == 1.0:
            raise self._damaged("rope_theta", "another number than 1 with yarn", rope.theta)
        factor = self._factor()
        amplitude = self._optional("attention_factor")
        if amplitude is None:
            amplitude = self._yarn_amplitude(factor)
        return replace(
            rope,
            factor=factor,
            amplitude=amplitude,
            original_max_position=self._original(),
            beta_fast=self._optional("beta_fast") or 32.0,
            beta_slow=self._optional("beta_slow") or 1.0,
            truncate=self._values.get("truncate", True) is not False,
        )

    def _yarn_amplitude(self, factor: float) -> float:
        mscale, all_dims = self._optional("mscale"), self._optional("mscale_all_dim")
        if mscale is None or all_dims is None:
            return _magnitude(factor, 1.0)
        return _magnitude(factor, mscale) / _magnitude(factor, all_dims)

    def _longrope(self, rope: RopeConfig, num_pairs: int) -> RopeConfig:
        original, factor = self._original(least=2), self._factor()
        amplitude = self._optional("attention_factor")
        if amplitude is None:
            stretch = math.log(factor) / math.log(original) if factor > 1.0 else 0.0
            amplitude = math.sqrt(1 + stretch)
        return replace(
            rope,
            factor=factor,
            amplitude=amplitude,
            original_max_position=original,
            short_factors=self._factors("short_factor", num_pairs),
            long_factors=self._factors("long_factor", num_pairs),
        )

    def _share(self) -> float:
        share = self._values.get("partial_rotary_factor")
        if share is None:
            return 1.0
        if not is_positive_number(share) or share > 1:
            raise self._damaged("partial_rotary_factor", "a number above 0, up to 1", share)
        return float(share)

    def _factor(self) -> float:
        factor = self._optional("factor")
        return self._max_position / self._original() if factor is None else factor

    def _original(self, least: int = 1) -> int:
        name = "original_max_position_embeddings"
        given = self._values.get(name)
        original = self._max_position if given is None else int(self._positive(name))
        if original < least:
            raise self._damaged(name, f"{least} or more", given)
        return original

    def _factors(self, name: str, count: int) -> tuple[float, ...]:
        values = self._values.get(name)
        if (
            not isinstance(values, list)
            or len(values) != count
            or not all(is_positive_number(value) for value in values)
        ):
            raise self._damaged(name, f"a list of {count} positive numbers", values)
        return tuple(float(value) for value in values)

    def _optional(self, name: str) -> float | None:
        return None if self._values.get(name) is None else self._positive(name)

    def _positive(self, name: str) -> float:
        value = self._values.get(name)
        if not is_positive_number(value):
            raise self._damaged(name, "a positive number", value)
        return float(value)

    def _damaged(self, name: str, wanted: str, value: object) -> DamagedModel:
        return DamagedModel(
            f"{self._path}: rope setting {name} must be {wanted}, not {value!r}",
            fix=_FIX,
        )


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
