"""Which sequences can never run on a worker."""

from tidemill.protocol.errors import InvalidRequest
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.memory.block_manager import BlockManager


def check_length(seq: Sequence, max_model_len: int, blocks: BlockManager) -> None:
    """Raise ``InvalidRequest`` if the model's context or the KV cache can never hold ``seq``."""
    if seq.num_tokens >= max_model_len:
        raise InvalidRequest(
            f"the prompt has {seq.num_tokens} tokens, the model's context holds {max_model_len} "
            "with at least one token of output",
            field="prompt",
            fix=f"Shorten the prompt to {max_model_len - 1} tokens or fewer.",
        )
    max_tokens = seq.params.max_tokens
    longest = max_model_len
    if max_tokens is not None:
        longest = min(longest, seq.num_prompt_tokens + max_tokens)
    # The last token is never fed back, so it needs no room in the cache.
    if blocks.num_blocks_for(max(longest - 1, seq.num_tokens)) > blocks.num_blocks:
        room = blocks.num_blocks * blocks.block_size
        raise InvalidRequest(
            f"prompt and output can reach {longest} tokens, the KV cache holds {room}",
            field="max_tokens",
            fix="Lower max_tokens, shorten the prompt, or give the worker a larger KV cache.",
        )
