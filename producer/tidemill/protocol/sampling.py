"""How the tokens of a job are chosen and when they end."""

from typing import Annotated

from pydantic import Field, model_validator

from tidemill.protocol.values import AnyText, Count, TokenIds
from tidemill.protocol.wire_model import WireModel

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_SEED = 2**63 - 1


class SamplingParams(WireModel):
    """How tokens are chosen; names, defaults and limits are vLLM's.

    ``max_tokens=None`` means up to the model's context.  ``top_k=0`` and ``-1`` switch top-k off.
    ``temperature=0`` is greedy.
    """

    max_tokens: Count | None = Field(default=None, ge=1)
    min_tokens: Count = Field(default=0, ge=0)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_k: Count = Field(default=0, ge=-1)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: Annotated[int, Field(strict=True)] | None = Field(default=None, ge=0, le=MAX_SEED)
    stop: tuple[Annotated[AnyText, Field(min_length=1, max_length=MAX_STOP_CHARS)], ...] = Field(
        default=(), max_length=MAX_STOP_STRINGS
    )
    stop_token_ids: TokenIds = Field(default=(), max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @model_validator(mode="after")
    def _min_below_max(self) -> "SamplingParams":
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        return self

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < 1e-5
