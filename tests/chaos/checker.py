"""The offline checker: a recorded run in, violations of the invariants out.  Pure.

I0 no process ends by itself, and each leaves in order when it is asked to
I1 every accepted job reaches exactly one terminal state, allowed by what was asked of it
I2 its tokens are contiguous and equal to the oracle's, in the log and for every subscriber
I3 one job per idempotency key; another body under the same key is refused
I4 counters return to zero, indexes are empty, no key lives for ever that should not
I6 every chunk is written by the holder of the latest claim; no epoch dispatches after a later one
I7 usage equals the tokens
I10 no job waits longer than ``MAX_WAIT_SECONDS`` for its first token, or than
    ``MAX_TRIAL_SECONDS`` if it was tried alone because its workers had died

I5 (webhooks) waits for webhooks; I8 (recovery time) and I9 (fairness) are measured, not judged.
"""

from chaos import check_ends, check_shard, check_tokens
from chaos.verdict import Run, Violation

RULES = (
    check_ends.check_ends,
    check_ends.check_times,
    check_ends.check_batches,
    check_ends.check_letters,
    check_ends.check_refusals,
    check_ends.check_back_doors,
    check_tokens.check_logs,
    check_tokens.check_subscribers,
    check_tokens.check_usage,
    check_shard.check_keys,
    check_shard.check_leaks,
    check_shard.check_writers,
    check_shard.check_epochs,
    check_shard.check_waits,
    check_shard.check_processes,
)


def check(run: Run) -> list[Violation]:
    """Judge a run."""
    return [violation for rule in RULES for violation in rule(run)]
