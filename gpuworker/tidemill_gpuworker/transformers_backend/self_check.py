"""Holds a model with our attention against the same model with its own, before it serves."""

from itertools import pairwise

import torch
from transformers import PreTrainedModel

from tidemill.protocol.errors import UnsupportedModel
from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.inputs import make_inputs
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.loading.model_choice import LoadOptions, MakeCache, Model
from tidemill_gpuworker.loading.model_config import ModelConfig
from tidemill_gpuworker.memory.kv_cache import KVCache
from tidemill_gpuworker.steps.step_plan import ScheduledSequence, StepPlan

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
    model: Model,
    config: ModelConfig,
    expected: torch.Tensor,
    options: LoadOptions,
    make_cache: MakeCache,
) -> None:
    """Raise UnsupportedModel unless ``model`` gives ``expected`` in chunks over a paged cache."""
    block_size, dtype = options.block_size, options.dtype
    seq = Sequence("check", _token_ids(config), SamplingParams(), seed=0)
    num_blocks = -(-len(seq.prompt_ids) // block_size)
    # Backwards, so that a table that is not heeded shows.
    seq.block_table = list(range(num_blocks - 1, -1, -1))
    cache = make_cache(num_blocks, dtype)
    found = _paged_logits(model, seq, cache, options)
    difference = _difference(found, expected)
    if not difference <= _TOLERANCE.get(dtype, _HALF_TOLERANCE):
        ranks = options.place.tensor
        where = "" if ranks.is_whole else f", split over {ranks.count} ranks,"
        raise UnsupportedModel(
            f"{config.architecture} is not supported: with paged attention{where} its logits differ"
            f" from transformers' own by {difference:.2g} of their spread",
            fix="Choose a model whose layers all attend to earlier tokens and keep no other state.",
        )


def _paged_logits(
    model: Model,
    seq: Sequence,
    cache: KVCache,
    options: LoadOptions,
) -> torch.Tensor:
    num_tokens = seq.num_prompt_tokens
    parts = []
    # Chunks that end inside a block, and one token alone.
    ends = [0, num_tokens // 2, num_tokens - 1, num_tokens]
    for start, end in pairwise(sorted(set(ends))):
        plan = StepPlan((ScheduledSequence(seq, start, end - start),))
        inputs = make_inputs(plan, options.block_size, options.device)
        parts.append(model.logits(model(inputs, cache, options.backend)))
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
