"""The list of models."""

from typing import Any, Literal

from tidemill.gateway.openai_models.base import ApiResponse


class Model(ApiResponse):
    """A served model, or an adapter of the one that is its ``parent``."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tidemill"
    root: str
    parent: str | None = None
    max_model_len: int
    task: str
    permission: tuple[dict[str, Any], ...] = ()


class ModelList(ApiResponse):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[Model]
