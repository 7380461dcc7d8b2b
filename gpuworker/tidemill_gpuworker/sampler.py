"""Choose the next token of every sequence in a step."""

import math
from collections.abc import Sequence as Collection

import torch

from tidemill_gpuworker import sampling_filters as filters
from tidemill_gpuworker.sampled_token import SampledToken
from tidemill_gpuworker.sequence import Sequence
from tidemill_kernels import randomness
from tidemill_kernels.backend import GumbelArgmax

#: As in vLLM: a lower temperature would divide logits into infinity.
MIN_TEMPERATURE = 0.01


class Sampler:
    """Applies min_tokens, temperature, min_p, top_k and top_p, in vLLM's order, and draws.

    A draw is fixed by the sequence's seed, the new token's position and the row of logits: the
    rest of the batch has no part in it.  ``gumbel_argmax`` may be a device's faster twin of
    ``tidemill_kernels.randomness.gumbel_argmax``.
    """

    def __init__(
        self,
        eos_token_ids: Collection[int] = (),
        *,
        gumbel_argmax: GumbelArgmax = randomness.gumbel_argmax,
    ) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._gumbel_argmax = gumbel_argmax

    def sample(self, logits: torch.Tensor, rows: Collection[Sequence]) -> list[SampledToken]:
        """Return the next token of each sequence; ``logits`` is float32 [len(rows), vocab].

        Raises ``ArithmeticError`` if a row has no usable logit, that is, the model broke down.
        """
        logits = self._forbid_early_stops(logits, rows)
        drawn = [row for row, seq in enumerate(rows) if not seq.params.is_greedy]
        if len(drawn) == len(rows):
            tokens = self._draw(logits.clone(), rows)
        else:
            tokens = logits.argmax(dim=1)
            if drawn:
                index = torch.tensor(drawn, device=logits.device)
                tokens[index] = self._draw(logits[index], [rows[row] for row in drawn])
        _check(logits, tokens, rows)
        return [SampledToken(int(token)) for token in tokens.tolist()]

    def _forbid_early_stops(self, logits: torch.Tensor, seqs: Collection[Sequence]) -> torch.Tensor:
        rows: list[int] = []
        columns: list[int] = []
        for row, seq in enumerate(seqs):
            if len(seq.output_ids) < seq.params.min_tokens:
                stops = self._stop_ids(seq)
                rows += [row] * len(stops)
                columns += stops
        if not rows:
            return logits
        index = torch.tensor([rows, columns], device=logits.device)
        nothing = torch.tensor(float("-inf"), device=logits.device)
        return logits.index_put((index[0], index[1]), nothing)

    def _stop_ids(self, seq: Sequence) -> list[int]:
        params = seq.params
        return [*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)]

    def _draw(self, logits: torch.Tensor, seqs: Collection[Sequence]) -> torch.Tensor:
        # float32 [len(seqs), vocab], overwritten -> int64 [len(seqs)]
        _filter(logits, seqs)
        seeds = [randomness.to_int64(seq.seed) for seq in seqs]
        positions = [seq.num_tokens for seq in seqs]
        return self._gumbel_argmax(
            logits,
            torch.tensor(seeds, dtype=torch.int64, device=logits.device),
            torch.zeros(len(seqs), dtype=torch.int32, device=logits.device),
            torch.tensor(positions, dtype=torch.int32, device=logits.device),
        )


def _filter(logits: torch.Tensor, seqs: Collection[Sequence]) -> None:
    device = logits.device
    temperatures = [max(seq.params.temperature, MIN_TEMPERATURE) for seq in seqs]
    min_p = [seq.params.min_p for seq in seqs]
    top_k = [seq.params.top_k for seq in seqs]
    top_p = [seq.params.top_p for seq in seqs]
    if any(value != 1.0 for value in temperatures):
        filters.apply_temperature(logits, torch.tensor(temperatures, device=device))
    if any(value > 0.0 for value in min_p):
        log_min_p = [math.log(value) if value else -math.inf for value in min_p]
        filters.apply_min_p(logits, torch.tensor(log_min_p, device=device))
    if any(value > 0 for value in top_k):
        filters.apply_top_k(logits, torch.tensor(top_k, device=device))
    if any(value < 1.0 for value in top_p):
        filters.apply_top_p(logits, torch.tensor(top_p, device=device))


def _check(logits: torch.Tensor, tokens: torch.Tensor, seqs: Collection[Sequence]) -> None:
    chosen = logits.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
    is_usable = chosen.isfinite() & (tokens >= 0)
    if not bool(is_usable.all()):
        broken = [
            seq.seq_id for seq, usable in zip(seqs, is_usable.tolist(), strict=True) if not usable
        ]
        raise ArithmeticError(f"the model gave no finite logits for {', '.join(broken)}")
