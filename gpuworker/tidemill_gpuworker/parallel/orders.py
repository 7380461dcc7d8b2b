"""What the leader tells its ranks, as plain data: no object is ever unpickled."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tidemill_gpuworker.engine.inputs import StepInputs
from tidemill_gpuworker.lora.layers import HeldAdapter, LoadedAdapter
from tidemill_gpuworker.memory.block_copies import BlockCopies, BlockCopy
from tidemill_kernels import AttentionMetadata

JOIN, LOAD, CACHE, COPY, STEP, LOGITS = "join", "load", "cache", "copy", "step", "logits"
ADAPTER, ADAPT = "adapter", "adapt"
#: The answers to the first three.
DONE, FAILED = "done", "failed"

_LONGS = ("token_ids", "positions", "slot_mapping", "sampled_rows")
_INTS = ("block_tables", "seq_lens", "cu_seqlens_q")
_NUMBERS = ("max_seqlen_q", "max_seq_len", "num_decodes")


def pack_inputs(inputs: StepInputs) -> dict[str, Any]:
    """Return a step as bytes and numbers."""
    metadata = inputs.metadata
    return {
        **{name: _bytes(getattr(inputs, name)) for name in _LONGS},
        **{name: _bytes(getattr(metadata, name)) for name in _INTS},
        **{name: getattr(metadata, name) for name in _NUMBERS},
    }


def unpack_inputs(fields: dict[str, Any], device: torch.device) -> StepInputs:
    """Return the step that ``pack_inputs`` made ``fields`` of."""
    longs = {name: _tensor(fields[name], np.dtype(np.int64), device) for name in _LONGS}
    ints = {name: _tensor(fields[name], np.dtype(np.int32), device) for name in _INTS}
    metadata = AttentionMetadata(
        block_tables=ints["block_tables"].view(len(ints["seq_lens"]), -1),
        seq_lens=ints["seq_lens"],
        cu_seqlens_q=ints["cu_seqlens_q"],
        max_seqlen_q=int(fields["max_seqlen_q"]),
        max_seq_len=int(fields["max_seq_len"]),
        num_decodes=int(fields["num_decodes"]),
    )
    return StepInputs(**longs, metadata=metadata)


def pack_copies(copies: BlockCopies) -> dict[str, Any]:
    """Return the copies as pairs of numbers."""
    return {
        name: [[copy.source, copy.target] for copy in getattr(copies, name)]
        for name in BlockCopies.__slots__
    }


def unpack_copies(fields: dict[str, Any]) -> BlockCopies:
    """Return the copies that ``pack_copies`` made ``fields`` of."""
    return BlockCopies(
        **{name: tuple(BlockCopy(*pair) for pair in pairs) for name, pairs in fields.items()}
    )


def pack_adapter(adapter: LoadedAdapter, held: HeldAdapter) -> Iterator[dict[str, Any]]:
    """Yield an adapter layer by layer: all of it at once may be more than a message holds."""
    modules = held.modules
    for module in modules:
        yield {
            "key": adapter.key,
            "name": adapter.name,
            "digest": held.digest,
            "directory": str(held.directory),
            "module": module,
            "matrices": [[list(m.shape), _bytes(m.contiguous())] for m in held.matrices(module)],
            "is_last": module == modules[-1],
        }


def unpack_matrices(fields: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrices of a layer that ``pack_adapter`` made ``fields`` of."""
    cpu, dtype = torch.device("cpu"), np.dtype(np.float32)
    down, up = (_tensor(data, dtype, cpu).view(shape) for shape, data in fields["matrices"])
    return down, up


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype in torch."""
    return str(dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _tensor(data: bytes, dtype: np.dtype[Any], device: torch.device) -> torch.Tensor:
    # A copy, because torch warns about memory that it must not write to.
    return torch.from_numpy(np.frombuffer(data, dtype).copy()).to(device, non_blocking=True)
