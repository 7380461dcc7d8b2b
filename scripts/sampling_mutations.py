"""Bugs of sampling and logprobs that the test suite must find."""

from mutation import Mutation

_EDITS = "gpuworker/tidemill_gpuworker/sampling/logit_edits.py"
_EDIT_TESTS = "tests/text/test_logit_edits.py"
_LOGPROB_TESTS = "tests/text/test_logprobs.py"
_GENERATION = "tests/model/test_sampled_generation.py"

SAMPLING_MUTATIONS = (
    Mutation(
        "the frequency penalty looks at presence alone",
        _EDITS,
        "values -= spread([p.frequency_penalty for p in params]) * counts",
        "values -= spread([p.frequency_penalty for p in params]) * (counts > 0)",
        (f"{_EDIT_TESTS}::test_penalties_are_those_of_a_float64_reference",),
    ),
    Mutation(
        "the repetition penalty divides negative logits too",
        _EDITS,
        "torch.where(values > 0, values / repetition, values * repetition)",
        "values / repetition",
        (f"{_EDIT_TESTS}::test_repetition_penalty_is_that_of_transformers",),
    ),
    Mutation(
        "penalties come before the bias",
        _EDITS,
        "    add_bias(logits, edited)\n    apply_guides(logits, edited)\n"
        "    apply_penalties(logits, edited)\n",
        "    apply_penalties(logits, edited)\n    add_bias(logits, edited)\n"
        "    apply_guides(logits, edited)\n",
        (f"{_EDIT_TESTS}::test_penalties_come_after_the_bias",),
    ),
    Mutation(
        "edits are made to the row of another sequence",
        "gpuworker/tidemill_gpuworker/sampling/sampler.py",
        "[Edited(n, each.row, each.edits) for n, each in numbered if each.edits]",
        "[Edited(0, each.row, each.edits) for n, each in numbered if each.edits]",
        (f"{_EDIT_TESTS}::test_a_row_gives_the_same_token_and_logprobs_in_any_batch_and_order",),
    ),
    Mutation(
        "equal logprobs are told as they come",
        "gpuworker/tidemill_gpuworker/sampling/logprobs.py",
        "bitwise_left_shift_(32).bitwise_or_(ids)",
        "bitwise_left_shift_(32).bitwise_or_(ids.flip(0))",
        (f"{_LOGPROB_TESTS}::test_logprobs_are_those_of_a_float64_reference",),
    ),
    Mutation(
        "prompts whose logprobs are wanted are looked up in the prefix cache",
        "gpuworker/tidemill_gpuworker/memory/prefix_lookup.py",
        "self._is_enabled and not seq.lacks_prompt_logprobs",
        "self._is_enabled",
        (f"{_GENERATION}::test_a_cached_prefix_is_computed_again_for_its_logprobs",),
    ),
    Mutation(
        "a resumed job forgets the logprobs of the attempt before it",
        "gpuworker/tidemill_gpuworker/shell/token_buffer.py",
        "self._placed.add(chunk.ids, chunk.text, chunk.logprobs)",
        "self._placed.add(chunk.ids, chunk.text, None)",
        (
            "tests/worker/test_token_buffer.py"
            "::test_logprobs_go_with_their_tokens_also_those_of_an_earlier_attempt",
        ),
    ),
)
