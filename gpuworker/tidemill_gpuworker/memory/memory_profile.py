"""How much memory of a GPU is left for KV blocks once a step of the largest size has run."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tidemill.protocol.errors import ConfigError
from tidemill.protocol.sampling import SamplingParams
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.steps.step_plan import ScheduledSequence, StepPlan

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes of a device: all of it, and what is taken before the first KV block.

    ``step_peak`` is what the largest step holds at most beside the weights; ``other`` belongs to
    the driver, to libraries and to other processes.
    """

    total: int
    weights: int
    step_peak: int
    other: int

    def kv_cache_bytes(self, utilization: float) -> int:
        """Return what the KV cache may take, so that ``utilization`` of the device is in use.

        The formula is vLLM's: utilization x total - weights - peak of a step - everything else.

        Raises:
            ConfigError: nothing is left.
        """
        left = int(utilization * self.total) - self.weights - self.step_peak - self.other
        if left <= 0:
            raise ConfigError(
                f"no memory is left for the KV cache: {utilization} of {_gib(self.total)} less "
                f"{_gib(self.weights)} of weights, {_gib(self.step_peak)} for a step and "
                f"{_gib(self.other)} that others use",
                fix="Raise gpu_memory_utilization, lower max_num_batched_tokens or max_num_seqs, "
                "or choose a smaller dtype or model.",
            )
        return left

    def describe(self, utilization: float) -> str:
        """Return the formula with its figures, for the log."""
        return (
            f"KV cache {_gib(self.kv_cache_bytes(utilization))} = {utilization} x "
            f"{_gib(self.total)} - weights {_gib(self.weights)} - step {_gib(self.step_peak)} - "
            f"other {_gib(self.other)}"
        )


def measure_memory(
    device: torch.device, weights: int, run_step: Callable[[], None]
) -> MemoryProfile:
    """Run a step on a CUDA device and return what it and everything else take."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    other = total - free - torch.cuda.memory_reserved(device)
    return MemoryProfile(total=total, weights=weights, step_peak=peak, other=max(0, other))


def largest_step(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    block_size: int,
    *,
    num_drafted: int = 0,
) -> StepPlan:
    """Return a step of as many tokens and sampled rows as a step may have.

    ``num_drafted`` tokens of each sequence, where it has so many, are guesses.

    All its sequences have the same few blocks, as what they compute does not matter.
    """
    num_seqs = min(max_num_seqs, max_num_batched_tokens)
    length = min(max_model_len, max_num_batched_tokens // num_seqs)
    return StepPlan(
        tuple(
            _profiled(f"profile-{number}", length, block_size, min(num_drafted, length - 1))
            for number in range(num_seqs)
        )
    )


def _profiled(seq_id: str, length: int, block_size: int, num_drafted: int) -> ScheduledSequence:
    seq = Sequence(seq_id, [0] * (length - num_drafted), SamplingParams(), seed=0)
    seq.block_table = list(range(-(-length // block_size)))
    return ScheduledSequence(seq, 0, length, (0,) * num_drafted)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
