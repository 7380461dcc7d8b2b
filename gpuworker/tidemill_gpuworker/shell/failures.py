"""Why attempts fail, and which of them another attempt may mend."""

from dataclasses import dataclass

from tidemill.protocol.errors import (
    InvalidRequest,
    ModelError,
    ProtocolError,
    StreamGap,
    TidemillError,
)

#: About the job itself: every worker would come to the same end.
_FOR_GOOD = (InvalidRequest, ModelError, ProtocolError, StreamGap)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt ended early, as its owner is told; one that may pass is tried again."""

    reason: str
    may_pass: bool = True


def failure_of(error: Exception, what: str) -> Failure:
    """Judge an error; ``what`` tells what failed, where the error itself is not for users."""
    if isinstance(error, TidemillError):
        return Failure(error.one_line(), may_pass=not isinstance(error, _FOR_GOOD))
    # The name alone: a message may quote the prompt.
    return Failure(f"{what}: {type(error).__name__}")
