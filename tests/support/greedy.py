"""Greedy generation by our engine and by transformers, side by side."""

from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass, field

import torch
import transformers

from tidemill.protocol.prefix import lora_keys
from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.lora.layers import LoadedAdapter
from tidemill_gpuworker.memory.block_manager import BlockManager
from tidemill_gpuworker.steps.step_config import StepConfig
from tidemill_gpuworker.steps.step_scheduler import StepScheduler

_MAX_PADDING = 32


@dataclass
class GreedyRun:
    """What our engine generated, and how; ``logits`` has one row per generated token."""

    outputs: list[list[int]]
    logits: list[torch.Tensor]
    num_steps: int = 0
    num_chunked: int = 0
    #: Steps of which no token is sampled.
    num_silent: int = 0
    num_hit_tokens: int = 0
    num_preemptions: int = 0
    largest_batch: int = 0
    decode_sizes: set[int] = field(default_factory=set)


@dataclass
class _Driver:
    runner: ModelRunner
    scheduler: StepScheduler
    max_tokens: Several[int]
    logits: dict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))

    def step(self, run: GreedyRun) -> None:
        plan = self.scheduler.schedule()
        rows = self.runner.execute(plan)
        run.num_steps += 1
        run.largest_batch = max(run.largest_batch, len(plan.scheduled))
        if len(plan.sampling) == sum(item.num_tokens for item in plan.scheduled):
            run.decode_sizes.add(len(plan.sampling))
        run.num_silent += not plan.sampling
        run.num_chunked += sum(not item.samples for item in plan.scheduled)
        sampled = [item.seq for item in plan.sampling]
        self.scheduler.update(plan, [(token,) for token in rows.argmax(-1).tolist()])
        for seq, row in zip(sampled, rows, strict=True):
            self.logits[seq.seq_id].append(row)
            if len(seq.output_ids) == self.max_tokens[int(seq.seq_id)]:
                self.scheduler.finish(seq)
        self.scheduler.check_integrity()


def generate_greedily(
    runner: ModelRunner,
    prompts: list[list[int]],
    max_tokens: int | Several[int],
    config: StepConfig,
    adapters: Several[LoadedAdapter | None] = (),
) -> GreedyRun:
    """Generate ``max_tokens`` tokens for all prompts at once, through scheduler and block pool.

    There may be a number for each prompt.
    ``adapters`` are those of the prompts, if any has one.
    """
    blocks = BlockManager(runner.num_blocks, runner.block_size, window=runner.model_config.window)
    counts = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    driver = _Driver(runner, StepScheduler(config, blocks), counts)
    params = SamplingParams(temperature=0.0, max_tokens=max(counts), ignore_eos=True)
    seqs = [Sequence(str(i), list(ids), params, seed=0) for i, ids in enumerate(prompts)]
    for seq, adapter in zip(seqs, adapters, strict=False):
        seq.adapter = adapter
        seq.extra_keys = lora_keys(adapter.name, adapter.digest) if adapter else None
    for seq in seqs:
        driver.scheduler.add(seq)
    run = GreedyRun([], [])
    while driver.scheduler.has_work:
        driver.step(run)
    assert blocks.num_free_blocks == blocks.num_blocks
    run.outputs = [seq.output_ids for seq in seqs]
    run.logits = [torch.stack(driver.logits[seq.seq_id]) for seq in seqs]
    run.num_hit_tokens = driver.scheduler.num_hit_tokens
    run.num_preemptions = driver.scheduler.num_preemptions
    return run


@torch.inference_mode()
def reference_outputs(
    model: transformers.PreTrainedModel,
    prompts: Several[list[int]],
    max_tokens: int,
    *,
    num_at_once: int = 1,
) -> list[list[int]]:
    """What ``transformers`` generates greedily for each prompt, ignoring the end token.

    Prompts of like length may be generated for a few at a time: padded in front, which is masked.
    """
    model = _text_part(model)
    # None in the call alone would be filled in from here.
    model.generation_config.eos_token_id = None
    outputs: dict[int, list[int]] = {}
    for places in _batches(prompts, num_at_once):
        ids, mask = _pad([prompts[place] for place in places])
        tokens = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        outputs.update(zip(places, tokens[:, ids.shape[1] :].tolist(), strict=True))
    assert all(len(output) == max_tokens for output in outputs.values())
    return [outputs[place] for place in range(len(prompts))]


def _text_part(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    # The whole Llama 4 of transformers 5.24 fails without an image.
    part: transformers.PreTrainedModel = getattr(model, "language_model", model)
    return part


def _batches(prompts: Several[list[int]], num_at_once: int) -> Iterator[list[int]]:
    """Return the places of prompts, in batches in which none needs much padding."""
    batch: list[int] = []
    for place in sorted(range(len(prompts)), key=lambda place: len(prompts[place])):
        padding = len(prompts[place]) - len(prompts[batch[0]]) if batch else 0
        if len(batch) == num_at_once or padding > _MAX_PADDING:
            yield batch
            batch = []
        batch.append(place)
    yield batch


def _pad(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask, both [prompts, longest]."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


@torch.inference_mode()
def reference_logits(
    model: transformers.PreTrainedModel, prompt: list[int], output: list[int]
) -> torch.Tensor:
    """The logits from which each token of ``output`` was to be chosen, [tokens, vocabulary]."""
    known = torch.tensor([prompt + output[:-1]])
    logits: torch.Tensor = _text_part(model)(
        known, use_cache=False, logits_to_keep=len(output)
    ).logits
    return logits[0]
