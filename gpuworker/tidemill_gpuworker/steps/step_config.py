"""The limits of one engine step."""

import math
from dataclasses import dataclass
from typing import Literal

from tidemill.protocol.errors import ConfigError

SchedulingMode = Literal["continuous", "static"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """How much one step may hold; names and meanings are vLLM's.

    ``max_model_len`` bounds prompt and output of a sequence together.  A prefill longer than
    ``long_prefill_token_threshold`` (0: no limit) is cut into chunks of that many tokens even if
    the step has room, so that short prompts get their share.

    While an interactive or standard sequence decodes, prefills are cut so that a step is predicted
    to take ``tpot_slo_seconds`` at most (0: no limit).  A batch sequence is admitted only if no
    more than ``batch_kv_share`` of the KV blocks are held then.  Steps that prefill for interactive
    sequences leave decodes of batch ones out, ``max_paused_steps`` in a row at most (0: none).
    If all ``max_num_seqs`` places are taken, interactive sequences take those of batch ones that
    were preempted fewer than ``max_displacements`` times (0: never).

    ``scheduling_mode`` "static" is for measurements: a batch runs until its last sequence ends, and
    each has the room of ``max_model_len`` tokens to itself.
    Raises ``ConfigError``.
    """

    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    tpot_slo_seconds: float = 0.0
    batch_kv_share: float = 0.85
    max_paused_steps: int = 64
    max_displacements: int = 3
    scheduling_mode: SchedulingMode = "continuous"

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                _reject(f"{name} is {getattr(self, name)}", "Set it to 1 or more.")
        if self.max_displacements < 0:
            _reject("max_displacements is negative", "Set it to 0 so that nobody loses its place.")
        if self.max_paused_steps < 0:
            _reject("max_paused_steps is negative", "Set it to 0 to never pause batch decodes.")
        if self.long_prefill_token_threshold < 0:
            _reject("long_prefill_token_threshold is negative", "Set it to 0 for no limit.")
        # Decodes alone must never use up a step, or a prefill in progress could wait for ever.
        if self.max_num_batched_tokens < self.max_num_seqs:
            _reject(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below "
                f"max_num_seqs {self.max_num_seqs}",
                "Every running sequence needs one token per step: raise it, or lower the other.",
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            _reject(
                f"without chunked prefill a prompt of max_model_len {self.max_model_len} tokens "
                f"never fits into max_num_batched_tokens {self.max_num_batched_tokens}",
                "Enable chunked prefill, raise max_num_batched_tokens or lower max_model_len.",
            )
        self._check_shares()

    def _check_shares(self) -> None:
        if not 0.0 <= self.tpot_slo_seconds < math.inf:
            _reject(
                f"tpot_slo_seconds is {self.tpot_slo_seconds}",
                "Set it to the longest step in seconds, or to 0 for no limit.",
            )
        if self.tpot_slo_seconds and not self.enable_chunked_prefill:
            _reject(
                "tpot_slo_seconds needs prefills that can be cut",
                "Enable chunked prefill or set tpot_slo_seconds to 0.",
            )
        if not 0.0 < self.batch_kv_share <= 1.0:
            _reject(
                f"batch_kv_share {self.batch_kv_share} is not a share of the KV blocks",
                "Choose a value above 0 and up to 1; the default is 0.85.",
            )


def _reject(message: str, fix: str) -> None:
    raise ConfigError(message, fix=fix)
