"""Answer block operations with vLLM's own KVCacheManager: JSON lines in, JSON lines out.

Run by the Python of a virtual environment that has vLLM (`make vllm-check` makes one); it imports
nothing of ours.  `tests/support/vllm_blocks.py` says what the operations are.
"""

import json
import os
import sys
from typing import Any

# Standard output is the wire.
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

MAX_MODEL_LEN = 8192

Answer = dict[str, Any]


class VllmBlocks:
    """A KVCacheManager, and the requests that it is asked about."""

    def __init__(self, num_blocks: int, block_size: int, caching: bool) -> None:
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        # One more: vLLM keeps the first one as its null block, which nobody gets.
        config = KVCacheConfig(num_blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])
        self._manager = KVCacheManager(
            config,
            MAX_MODEL_LEN,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
            enable_caching=caching,
        )
        self._hasher = get_request_block_hasher(block_size, sha256_cbor) if caching else None
        self._requests: dict[str, Request] = {}

    def add(self, seq: str, tokens: list[int], salt: str | None) -> Answer:
        """Take in a request; tell its block hashes."""
        request = Request(
            seq,
            tokens,
            SamplingParams(max_tokens=MAX_MODEL_LEN),
            None,
            cache_salt=salt,
            block_hasher=self._hasher,
        )
        self._requests[seq] = request
        return {"hashes": [block_hash.hex() for block_hash in request.block_hashes]}

    def admit(self, seq: str, chunk: int) -> Answer:
        """Look its prefix up, and give it blocks for a chunk if all of it would fit."""
        request = self._requests[seq]
        blocks, num_cached, _ = self._manager.get_computed_blocks(request)
        count = min(chunk, request.num_tokens - num_cached)
        given = self._manager.allocate_slots(
            request, count, num_cached, blocks, full_sequence_must_fit=True
        )
        if given is not None:
            request.num_computed_tokens = num_cached + count
        return {"cached": num_cached, "ok": given is not None, "free": self._num_free()}

    def advance(self, seq: str, count: int) -> Answer:
        """Give it blocks for its next tokens."""
        request = self._requests[seq]
        given = self._manager.allocate_slots(request, count)
        if given is not None:
            request.num_computed_tokens += count
        return {"ok": given is not None, "free": self._num_free()}

    def append(self, seq: str, token: int) -> Answer:
        """Give it a token of output; tell its last block hash."""
        request = self._requests[seq]
        request.append_output_token_ids(token)
        last = request.block_hashes[-1].hex() if request.block_hashes else ""
        return {"count": request.num_tokens, "hash": last}

    def preempt(self, seq: str) -> Answer:
        """Take its blocks away; it will come back."""
        request = self._requests[seq]
        self._manager.free(request)
        request.num_computed_tokens = 0
        return {"free": self._num_free()}

    def finish(self, seq: str) -> Answer:
        """Take its blocks away for good."""
        self._manager.free(self._requests.pop(seq))
        return {"free": self._num_free()}

    def _num_free(self) -> int:
        return self._manager.block_pool.get_num_free_blocks()


def main() -> None:
    """Do what each line says until they end."""
    init_none_hash(sha256_cbor)
    blocks: VllmBlocks | None = None
    for line in sys.stdin:
        name, arguments = json.loads(line)
        if name == "start":
            blocks = VllmBlocks(*arguments)
            answer: Answer = {}
        else:
            answer = getattr(blocks, name)(*arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
