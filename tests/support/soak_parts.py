"""What computes in a soak: a model that shows which tokens are right, or one of real tensors."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.fake_engine import FakeRunner, FakeSampler

NUM_BLOCKS = 60
BLOCK_SIZE = 4
_NUM_SWAP_BLOCKS = 40
#: For as many blocks, of the tiny model.
_SWAP_BYTES = 128 << 10


@dataclass(frozen=True)
class Parts:
    """A runner and a sampler that understands its logits; ``fake`` is the runner if it is one."""

    runner: Any
    sampler: Any
    num_swap_blocks: int
    fake: FakeRunner | None = None


def fake_parts(vocab_size: int) -> Parts:
    """Return a model whose tokens follow from the history that its block table leads to."""
    runner = FakeRunner(NUM_BLOCKS, BLOCK_SIZE, vocab_size=vocab_size)
    return Parts(runner, FakeSampler(), _NUM_SWAP_BLOCKS, runner)


def real_parts() -> Parts:
    """Return a small random model on torch, with its KV cache, swap space and sampler."""
    # Here, as the fake needs none of it and its memory is to be told apart from torch's.
    import torch

    from support.tiny_models import save_tiny_model
    from tidemill_gpuworker.engine.model_runner import ModelRunner
    from tidemill_gpuworker.sampling.sampler import Sampler

    with tempfile.TemporaryDirectory(prefix="tm-soak-") as directory:
        runner = ModelRunner(
            save_tiny_model("qwen3", Path(directory)),
            dtype="float32",
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            swap_space_bytes=_SWAP_BYTES,
            num_threads=1,
        )
    assert torch.get_num_threads() == 1
    return Parts(runner, Sampler(), runner.num_swap_blocks)
