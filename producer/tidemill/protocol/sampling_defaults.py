"""What a served model has requests sample with where they do not say it themselves."""

from typing import Any

from pydantic import Field

from tidemill.protocol.values import Count
from tidemill.protocol.wire_model import WireModel


class SamplingDefaults(WireModel):
    """Defaults of a model in place of those of ``SamplingParams``, with the same limits.

    None leaves a default as it is.
    """

    max_tokens: Count | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_k: Count | None = Field(default=None, ge=-1)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(default=None, gt=0.0)

    @property
    def given(self) -> dict[str, Any]:
        """The defaults that there are, by the name of the parameter."""
        return self.model_dump(exclude_none=True)
