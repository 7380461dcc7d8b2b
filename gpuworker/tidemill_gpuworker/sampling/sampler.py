"""Choose the next token of every sequence in a step."""

import math
from collections.abc import Collection
from collections.abc import Sequence as Several
from enum import StrEnum
from typing import NamedTuple

import torch

from tidemill.protocol.errors import NoTokenLeft
from tidemill.protocol.logprobs import TokenLogprobs
from tidemill_gpuworker.sampling import sampling_filters as filters
from tidemill_gpuworker.sampling.logit_edits import Edited, edit
from tidemill_gpuworker.sampling.logprobs import read_logprobs, wanted_logprobs
from tidemill_gpuworker.sampling.sampled_token import SampledToken
from tidemill_gpuworker.sampling.sampling_row import SamplingRow, SamplingState, state_of
from tidemill_gpuworker.sampling.thinking import ReasoningMarkers
from tidemill_kernels import randomness
from tidemill_kernels.backend import GumbelArgmax

#: As in vLLM: a lower temperature would divide logits into infinity.
MIN_TEMPERATURE = 0.01


class LogprobsMode(StrEnum):
    """Of which logits the logprobs are: the model's, or what the token was chosen from."""

    RAW = "raw_logprobs"
    PROCESSED = "processed_logprobs"


class _Touched(NamedTuple):
    """A row whose token is not simply its likeliest; ``edits`` is None if it is only drawn."""

    place: int
    row: SamplingRow
    edits: SamplingState | None


class Sampler:
    """Edits logits, filters them and draws, all in vLLM's order.

    allowed_token_ids, bad_words, min_tokens, logit_bias, guide, penalties, thinking_token_budget;
    temperature, min_p, top_k, top_p.  A token is fixed by the sequence's parameters, its own
    tokens, its seed, the new token's position and the row of logits: the rest of the batch has no
    part in it.
    ``markers`` are those of a model that reasons.
    ``gumbel_argmax`` may be a device's faster twin of ``tidemill_kernels.randomness``'.
    """

    def __init__(
        self,
        eos_token_ids: Collection[int] = (),
        *,
        gumbel_argmax: GumbelArgmax = randomness.gumbel_argmax,
        logprobs_mode: LogprobsMode = LogprobsMode.RAW,
        markers: ReasoningMarkers | None = None,
    ) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._gumbel_argmax = gumbel_argmax
        self._markers = markers
        self._tells_processed = logprobs_mode is LogprobsMode.PROCESSED

    def sample(self, logits: torch.Tensor, rows: Several[SamplingRow]) -> list[SampledToken]:
        """Return the next token of each row; ``logits`` is float32 [len(rows), vocab].

        Raises ``ArithmeticError`` if a row has no usable logit, that is, the model broke down,
        ``NoTokenLeft`` if the parameters of rows leave no token, and ``GrammarTooComplex``.
        """
        touched = self._touched(rows, logits.device)
        index = torch.tensor([each.place for each in touched], device=logits.device).long()
        work = logits.clone() if len(touched) == len(rows) else logits[index]
        tokens = torch.zeros_like(index) if len(touched) == len(rows) else logits.argmax(dim=1)
        if touched:
            tokens[index] = self._process(work, touched)
        _check(logits, work, index, tokens, rows)
        told = self._logprobs(self._source(logits, work, index), tokens, rows)
        return [SampledToken(token, told.get(place)) for place, token in enumerate(tokens.tolist())]

    def _touched(self, rows: Several[SamplingRow], device: torch.device) -> list[_Touched]:
        found: list[_Touched] = []
        for place, row in enumerate(rows):
            state = state_of(row, self._eos_token_ids, device, self._markers)
            needs_edits = state.edits(row)
            if needs_edits or not row.params.is_greedy:
                found.append(_Touched(place, row, state if needs_edits else None))
        return found

    def _process(self, work: torch.Tensor, touched: Several[_Touched]) -> torch.Tensor:
        # float32 [len(touched), vocab], becomes what is chosen from -> int64 [len(touched)]
        rows = [each.row for each in touched]
        numbered = enumerate(touched)
        edit(work, [Edited(n, each.row, each.edits) for n, each in numbered if each.edits])
        drawn = [n for n, row in enumerate(rows) if not row.params.is_greedy]
        if len(drawn) == len(rows):
            return self._draw(work, rows)
        tokens = work.argmax(dim=1)
        if drawn:
            index = torch.tensor(drawn, device=work.device)
            filtered = work[index]
            tokens[index] = self._draw(filtered, [rows[n] for n in drawn])
            work[index] = filtered
        return tokens

    def _source(
        self, logits: torch.Tensor, work: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        # The logits whose logprobs are told.
        if not self._tells_processed:
            return logits
        return work if len(work) == len(logits) else logits.index_copy(0, index, work)

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
    work: torch.Tensor,
    index: torch.Tensor,
    tokens: torch.Tensor,
    rows: Several[SamplingRow],
) -> None:
    columns = tokens.clamp(min=0)[:, None]
    chosen = logits.gather(1, columns)[:, 0]
    if len(index):
        chosen[index] = work.gather(1, columns[index])[:, 0]
    is_usable = chosen.isfinite() & (tokens >= 0)
    if bool(is_usable.all()):
        return
    unusable = (~is_usable).nonzero()[:, 0].tolist()
    broken = [rows[place].seq_id for place in unusable if not _is_sound(logits[place])]
    if broken:
        raise ArithmeticError(f"the model gave no finite logits for {', '.join(broken)}")
    raise NoTokenLeft(tuple(rows[place].seq_id for place in unusable))


def _is_sound(logits: torch.Tensor) -> bool:
    return bool(logits.isfinite().any()) and not bool(logits.isnan().any())
