"""What a step does, in the numbers that its duration depends on."""

from tidemill.protocol.step_cost import StepFeatures
from tidemill_gpuworker.steps.step_plan import StepPlan


def prefill_pairs(start: int, num_tokens: int) -> int:
    """Return the sum over ``num_tokens`` tokens from ``start`` on of the positions before each."""
    return num_tokens * start + num_tokens * (num_tokens - 1) // 2


def features_of(plan: StepPlan, seconds: float = 0.0) -> StepFeatures:
    """Describe a step; a single token counts as decoded, for that is how it is computed."""
    num_decodes = plan.num_decodes
    decodes, prefills = plan.scheduled[:num_decodes], plan.scheduled[num_decodes:]
    return StepFeatures(
        prefill_tokens=sum(item.num_tokens for item in prefills),
        decode_tokens=num_decodes,
        prefill_pairs=sum(prefill_pairs(item.start, item.num_tokens) for item in prefills),
        context_tokens=sum([item.start for item in decodes]) + num_decodes,
        seconds=seconds,
    )
