"""What the sampler says of one row of logits."""

from dataclasses import dataclass

from tidemill.protocol.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token; ``logprobs`` is set if its job asked for them."""

    id: int
    logprobs: TokenLogprobs | None = None
