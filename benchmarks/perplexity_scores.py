"""Scoring one window of tokens: by our engine's model runner, and by transformers."""

import argparse
import math
from pathlib import Path

import torch
import transformers
from perplexity_rows import Scorer

from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.model_runner import DTYPES, ModelRunner
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.steps.step_plan import ScheduledSequence, StepPlan

BLOCK_SIZE = 16


def our_scorer(
    options: argparse.Namespace, model_dir: Path, method: str | None, kv: str
) -> tuple[Scorer, int]:
    """Return a scorer by the logprobs that a job gets for its prompt, and the weights' bytes."""
    runner = ModelRunner(
        model_dir,
        device=options.device,
        dtype=options.dtype,
        block_size=BLOCK_SIZE,
        num_blocks=-(-options.window_tokens // BLOCK_SIZE),
        num_threads=options.threads,
        quantization=method,
        kv_cache_dtype=kv,
    )
    return lambda window: _score(runner, window), runner.memory_use().weights


def _score(runner: ModelRunner, window: list[int]) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    seq = Sequence("window", window, params, seed=0)
    seq.block_table = list(range(-(-len(window) // BLOCK_SIZE)))
    runner.execute(StepPlan((ScheduledSequence(seq, 0, len(window)),)))
    found = [item.logprob for item in seq.prompt_logprobs if item is not None]
    assert len(found) == len(window) - 1
    return -math.fsum(found)


def their_scorer(options: argparse.Namespace, model_dir: Path) -> Scorer:
    """Return a scorer by the logits of transformers."""
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=DTYPES[options.dtype]
    )
    model = model.to(options.device).eval()

    @torch.inference_mode()
    def score(window: list[int]) -> float:
        ids = torch.tensor([window], device=model.device)
        logprobs = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return -float(logprobs.gather(1, ids[0, 1:, None]).double().sum())

    return score
