"""Choose the next token of every sequence in a step."""

import math
from collections.abc import Collection
from collections.abc import Sequence as Several
from enum import StrEnum

import torch

from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.logprobs import TokenLogprobs
from tidemill_gpuworker import sampling_filters as filters
from tidemill_gpuworker.logit_edits import Edited, edit
from tidemill_gpuworker.logprobs import read_logprobs, wanted_logprobs
from tidemill_gpuworker.sampled_token import SampledToken
from tidemill_gpuworker.sampling_row import SamplingRow, state_of
from tidemill_kernels import randomness
from tidemill_kernels.backend import GumbelArgmax

#: As in vLLM: a lower temperature would divide logits into infinity.
MIN_TEMPERATURE = 0.01


class LogprobsMode(StrEnum):
    """Of which logits the logprobs are: the model's, or what the token was chosen from."""

    RAW = "raw_logprobs"
    PROCESSED = "processed_logprobs"


class Sampler:
    """Edits logits, filters them and draws, all in vLLM's order.

    allowed_token_ids, bad_words, min_tokens, logit_bias, guide, penalties; temperature, min_p,
    top_k, top_p.  A token is fixed by the sequence's parameters, its own tokens, its seed, the new
    token's position and the row of logits: the rest of the batch has no part in it.
    ``gumbel_argmax`` may be a device's faster twin of ``tidemill_kernels.randomness``'.
    """

    def __init__(
        self,
        eos_token_ids: Collection[int] = (),
        *,
        gumbel_argmax: GumbelArgmax = randomness.gumbel_argmax,
        logprobs_mode: LogprobsMode = LogprobsMode.RAW,
    ) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._gumbel_argmax = gumbel_argmax
        self._tells_processed = logprobs_mode is LogprobsMode.PROCESSED

    def sample(self, logits: torch.Tensor, rows: Several[SamplingRow]) -> list[SampledToken]:
        """Return the next token of each row; ``logits`` is float32 [len(rows), vocab].

        Raises ``ArithmeticError`` if a row has no usable logit, that is, the model broke down, and
        ``InvalidRequest`` if a row's parameters leave no token.
        """
        edited = self._edited(logits, rows)
        processed, tokens = self._choose(edited, rows)
        _check(logits, edited, tokens, rows)
        told = self._logprobs(processed if self._tells_processed else logits, tokens, rows)
        ids = tokens.tolist()
        return [SampledToken(token, told.get(place)) for place, token in enumerate(ids)]

    def _edited(self, logits: torch.Tensor, rows: Several[SamplingRow]) -> torch.Tensor:
        edited: list[Edited] = []
        for place, row in enumerate(rows):
            state = state_of(row, self._eos_token_ids, logits.device)
            if state.edits(row):
                edited.append(Edited(place, row, state))
        if not edited:
            return logits
        copy = logits.clone()
        edit(copy, edited)
        return copy

    def _choose(
        self, logits: torch.Tensor, rows: Several[SamplingRow]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # -> the logits that were chosen from, where they are told, and tokens, int64 [rows]
        drawn = [place for place, row in enumerate(rows) if not row.params.is_greedy]
        if not drawn:
            return logits, logits.argmax(dim=1)
        if len(drawn) == len(rows):
            filtered = logits.clone()
            return filtered, self._draw(filtered, rows)
        tokens = logits.argmax(dim=1)
        index = torch.tensor(drawn, device=logits.device)
        filtered = logits[index]
        tokens[index] = self._draw(filtered, [rows[place] for place in drawn])
        if self._tells_processed:
            logits = logits.index_copy(0, index, filtered)
        return logits, tokens

    def _draw(self, logits: torch.Tensor, rows: Several[SamplingRow]) -> torch.Tensor:
        # float32 [len(rows), vocab], overwritten -> int64 [len(rows)]
        _filter(logits, rows)
        seeds = [randomness.to_int64(row.seed) for row in rows]
        choices = [row.choice for row in rows]
        positions = [row.num_tokens for row in rows]
        return self._gumbel_argmax(
            logits,
            torch.tensor(seeds, dtype=torch.int64, device=logits.device),
            torch.tensor(choices, dtype=torch.int32, device=logits.device),
            torch.tensor(positions, dtype=torch.int32, device=logits.device),
        )

    def _logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, rows: Several[SamplingRow]
    ) -> dict[int, TokenLogprobs]:
        found = ((place, wanted_logprobs(row.params)) for place, row in enumerate(rows))
        wanted = {place: each for place, each in found if each is not None}
        if not wanted:
            return {}
        if len(wanted) < len(rows):
            index = torch.tensor(list(wanted), device=logits.device)
            logits, tokens = logits[index], tokens[index]
        told = read_logprobs(logits, tokens, list(wanted.values()))
        return dict(zip(wanted, told, strict=True))


def _filter(logits: torch.Tensor, rows: Several[SamplingRow]) -> None:
    device = logits.device
    temperatures = [max(row.params.temperature, MIN_TEMPERATURE) for row in rows]
    min_p = [row.params.min_p for row in rows]
    top_k = [row.params.top_k for row in rows]
    top_p = [row.params.top_p for row in rows]
    if any(value != 1.0 for value in temperatures):
        filters.apply_temperature(logits, torch.tensor(temperatures, device=device))
    if any(value > 0.0 for value in min_p):
        log_min_p = [math.log(value) if value else -math.inf for value in min_p]
        filters.apply_min_p(logits, torch.tensor(log_min_p, device=device))
    if any(value > 0 for value in top_k):
        filters.apply_top_k(logits, torch.tensor(top_k, device=device))
    if any(value < 1.0 for value in top_p):
        filters.apply_top_p(logits, torch.tensor(top_p, device=device))


def _check(
    logits: torch.Tensor,
    edited: torch.Tensor,
    tokens: torch.Tensor,
    rows: Several[SamplingRow],
) -> None:
    chosen = edited.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
    is_usable = chosen.isfinite() & (tokens >= 0)
    if bool(is_usable.all()):
        return
    unusable = (~is_usable).nonzero()[:, 0].tolist()
    broken = [rows[place].seq_id for place in unusable if not _is_sound(logits[place])]
    if broken:
        raise ArithmeticError(f"the model gave no finite logits for {', '.join(broken)}")
    raise InvalidRequest(
        f"params: what {rows[unusable[0]].seq_id} allows and forbids leaves no token to choose",
        field="params",
        fix="Look at allowed_token_ids, bad_words, min_tokens and the structure asked for.",
    )


def _is_sound(logits: torch.Tensor) -> bool:
    return bool(logits.isfinite().any()) and not bool(logits.isnan().any())
