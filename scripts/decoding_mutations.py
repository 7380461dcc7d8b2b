"""Bugs of speculation and LoRA that the test suite must find."""

from mutation import Mutation

_WORKER = "gpuworker/tidemill_gpuworker"
_STEPS = "tests/speculation/test_drafted_steps.py"
_SAME = "tests/speculation/test_same_output.py"
_ADAPTED = "tests/lora/test_adapted_models.py"
_CLAIMS = "tests/lora/test_claims.py"

DECODING_MUTATIONS = (
    Mutation(
        "every guess is taken for true",
        f"{_WORKER}/speculation/verification.py",
        "if tokens[end - 1].id != drafted:",
        "if drafted < 0:",
        (f"{_STEPS}::test_guesses_that_are_wrong_in_the_middle_change_nothing",),
    ),
    Mutation(
        "wrong guesses count for penalties",
        f"{_WORKER}/speculation/draft_row.py",
        "known.counts.copy()",
        "known.counts",
        (f"{_SAME}::test_speculation_changes_no_token_and_no_logprob",),
    ),
    Mutation(
        "blocks that wrong guesses reached stay taken",
        f"{_WORKER}/steps/step_scheduler.py",
        "self.block_manager.trim(item.seq)\n        self.speculation",
        "pass\n        self.speculation",
        (f"{_STEPS}::test_wrong_guesses_leave_nothing_in_the_cache_and_hold_no_block",),
    ),
    Mutation(
        "a prefix is found under another adapter",
        "producer/tidemill/service/prompt.py",
        "adapter = () if lora is None else lora_keys(*lora)",
        "adapter = ()",
        (
            f"{_CLAIMS}::test_a_claim_holds_the_adapter_and_keeps_its_prefixes_apart",
            f"{_CLAIMS}::test_the_producer_hashes_a_prompt_as_the_worker_does",
        ),
    ),
    Mutation(
        "an adapter changes the rows between its own too",
        f"{_WORKER}/lora/layers.py",
        "if sum(end - start for start, end in spans) == last - first:",
        "if last > first:",
        (f"{_ADAPTED}::test_adapters_in_one_batch_are_the_models_they_are_merged_into",),
    ),
)
