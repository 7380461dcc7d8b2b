"""The logprobs of a prompt's own tokens."""

from dataclasses import dataclass

from tidemill.protocol.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """A prompt's tokens and how likely each was after those before it; None for the first."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
