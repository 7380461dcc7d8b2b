"""How likely a token was, and which others were likely in its place."""

from typing import Annotated

from pydantic import Field

from tidemill.protocol.values import TokenId
from tidemill.protocol.wire_model import WireModel

#: Stands for minus infinity, which JSON cannot carry; as in vLLM.
LEAST_LOGPROB = -9999.0

Logprob = Annotated[float, Field(ge=LEAST_LOGPROB, le=0.0)]
#: (token id, logprob)
Alternative = tuple[TokenId, Logprob]


class TokenLogprobs(WireModel):
    """Natural logarithm of one token's probability, and those of other tokens in its place.

    ``rank`` is the token's place by falling probability, from 1; of equal ones the lower id goes
    first.  ``top`` holds the likeliest tokens in this order, as many as were asked for; ``asked``
    those whose ids the job named.
    """

    logprob: Logprob
    rank: int = Field(ge=1)
    top: tuple[Alternative, ...] = ()
    asked: tuple[Alternative, ...] = ()
