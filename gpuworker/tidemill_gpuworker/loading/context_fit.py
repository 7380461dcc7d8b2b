"""How long a context the KV cache has room for."""

import logging

from tidemill.protocol.errors import ConfigError

_log = logging.getLogger(__name__)


def fitting_context(
    max_model_len: int, wanted: int | None, num_blocks: int, block_size: int
) -> int:
    """Return how many tokens a sequence may have, prompt and output together.

    ``max_model_len`` is what the model is served with, ``wanted`` what its operator asked for, if
    anything.  A cache without room for one such sequence shortens the context, with a warning:
    jobs that do not say how long their answers are would fail otherwise, all of them.

    Raises:
        ConfigError: the cache has no room for the context that was asked for.
    """
    room = num_blocks * block_size
    if max_model_len <= room:
        return max_model_len
    if wanted is not None:
        raise ConfigError(
            f"max_model_len {max_model_len}: the KV cache holds {room} tokens",
            fix=f"Set --max-model-len to {room} or less, or give the worker a larger KV cache.",
        )
    _log.warning(
        "the model's context of %d tokens does not fit into the KV cache: it is served with"
        " --max-model-len %d; give that to all workers of the model, or this one a larger cache",
        *(max_model_len, room),
    )
    return room
