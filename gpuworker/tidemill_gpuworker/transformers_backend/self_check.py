"""Holds a model with our attention against the same model with its own, before it serves."""

from itertools import pairwise

import torch
from transformers import PreTrainedModel

from tidemill.protocol.errors import UnsupportedModel
from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.inputs import make_inputs
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.loading.model_config import ModelConfig
from tidemill_gpuworker.memory.kv_cache import make_kv_cache
from tidemill_gpuworker.steps.step_plan import ScheduledSequence, StepPlan
from tidemill_gpuworker.transformers_backend.model import TransformersModel
from tidemill_kernels import AttentionBackend

_NUM_TOKENS = 24
#: Largest difference of logits by their spread.  Seen of right models: 4e-6 in float32; in bfloat16
#: 0.015 with 2 layers, 0.07 with SmolLM2's 30.  An option of attention that goes unheeded gave 0.04
#: to 0.3, so in half precision only the coarse mistakes are found here.
_TOLERANCE = {torch.float32: 1e-3}
_HALF_TOLERANCE = 0.25


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, config: ModelConfig) -> torch.Tensor:
    """Return the logits [tokens, vocabulary] of the check's tokens with the model's attention."""
    tokens = torch.tensor([_token_ids(config)], device=model.device)
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits[0].float()


@torch.inference_mode()
def check_model(
    model: TransformersModel,
    config: ModelConfig,
    expected: torch.Tensor,
    backend: AttentionBackend,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    """Raise UnsupportedModel unless ``model`` gives ``expected`` in chunks over a paged cache."""
    found = _paged_logits(model, config, backend, block_size, dtype, expected.device)
    difference = _difference(found, expected)
    if not difference <= _TOLERANCE.get(dtype, _HALF_TOLERANCE):
        raise UnsupportedModel(
            f"{config.architecture} is not supported: with paged attention its logits differ from"
            f" transformers' own by {difference:.2g} of their spread",
            fix="Choose a model whose layers all attend to earlier tokens and keep no other state.",
        )


def _paged_logits(
    model: TransformersModel,
    config: ModelConfig,
    backend: AttentionBackend,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    ids = _token_ids(config)
    num_tokens = len(ids)
    seq = Sequence("check", ids, SamplingParams(), seed=0)
    num_blocks = -(-num_tokens // block_size)
    # Backwards, so that a table that is not heeded shows.
    seq.block_table = list(range(num_blocks - 1, -1, -1))
    cache = make_kv_cache(
        config, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device
    )
    parts = []
    # Chunks that end inside a block, and one token alone.
    ends = [0, num_tokens // 2, num_tokens - 1, num_tokens]
    for start, end in pairwise(sorted(set(ends))):
        plan = StepPlan((ScheduledSequence(seq, start, end - start),))
        inputs = make_inputs(plan, block_size, device)
        parts.append(model.logits(model(inputs, cache, backend)))
    return torch.cat(parts)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root mean square difference by the standard deviation, the median over the rows.

    The median, since in half precision a token may go to another expert, and be far off alone.
    """
    spread = expected.std(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((found - expected).square().mean(dim=-1).sqrt() / spread).median())


def _token_ids(config: ModelConfig) -> list[int]:
    # Steps of a prime stride reach all of the vocabulary.
    num_tokens = min(_NUM_TOKENS, config.max_model_len)
    return [(7919 * place + 11) % config.vocab_size for place in range(num_tokens)]
