"""What all messages of the wire have in common."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class WireModel(BaseModel):
    """Base of all messages; a new field needs a new ``codec.WIRE_VERSION``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


#: A count of things that may be large.
Natural = Annotated[int, Field(ge=0, le=2**63 - 1)]
#: A duration in seconds.
Seconds = Annotated[float, Field(ge=0.0)]
