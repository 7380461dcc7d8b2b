"""Counter-based random numbers: a draw depends on (seed, choice, position, token) and nothing else.

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as
1, 2, 3", SC 2011). For one token the key is (seed mod 2^32, seed div 2^32), the counter is
(token div 4, position, choice, 0), and the output word is number token mod 4. A word x becomes
u = (x div 2^9) * 2^-23 + 2^-24: 23 bits and a half step, so that u is exact in float32 and never
0 or 1. (With 24 bits the largest value would round to 1 and its Gumbel noise to infinity.)

This module is plain torch and runs on any device; `tidemill_kernels.native.randomness` holds the
same functions in C++.
"""

import torch

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_ROWS_AT_ONCE = 8

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Return the four output words of Philox4x32-10, elementwise over broadcast int64 tensors.

    Args:
        counter: four tensors of words in [0, 2^32).
        key: two tensors of words in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        # The products wrap around in int64; the masked halves are the unsigned ones all the same.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _WORD) ^ c1 ^ k0,
            p1 & _WORD,
            ((p0 >> 32) & _WORD) ^ c3 ^ k1,
            p0 & _WORD,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def word_to_uniform(word: torch.Tensor) -> torch.Tensor:
    """Return words in [0, 2^32), as int64, as float32 numbers strictly between 0 and 1."""
    return (word >> 9).float() * 2.0**-23 + 2.0**-24


def philox_uniform(seed: int, choice: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
    """Return one uniform number per token: float32, strictly between 0 and 1.

    Args:
        seed: 64 bits; -1 and 2^64 - 1 name the same seed.
        choice: which of a job's `n` outputs, in [0, 2^32).
        position: which token of the output, in [0, 2^32).
        token_ids: int64, any shape, in [0, 2^34).
    """
    device = token_ids.device
    row = [torch.tensor([value], device=device) for value in (to_int64(seed), choice, position)]
    return _uniform(row[0], row[1], row[2], token_ids.reshape(1, -1)).view(token_ids.shape)


def gumbel_argmax(
    logits: torch.Tensor, seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Sample a token per row: the argmax of logit - log(-log(u)) over the finite logits.

    The noise is computed in float64 and the lowest token wins a tie, so that every
    implementation picks the same token.

    Args:
        logits: float32 [rows, vocab]; tokens that are not finite are never picked.
        seeds: int64 [rows], the bits of the 64-bit seeds.
        choices: int32 [rows].
        positions: int32 [rows].

    Returns:
        int64 [rows]; -1 where a row has no finite logit.
    """
    check_rows(logits, seeds, choices, positions)
    starts = range(0, logits.shape[0], _ROWS_AT_ONCE)
    parts = [slice(start, start + _ROWS_AT_ONCE) for start in starts]
    picked = [_pick(logits[p], seeds[p], choices[p], positions[p]) for p in parts]
    return torch.cat(picked) if picked else seeds.new_empty(0)


def to_int64(seed: int) -> int:
    """Return the int64 with the bits of a 64-bit seed."""
    low = seed & (2**64 - 1)
    return low - 2**64 if low >= 2**63 else low


def check_rows(
    logits: torch.Tensor, seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor
) -> None:
    """Raise ValueError unless the arguments of `gumbel_argmax` fit together."""
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(f"logits must be float32 [rows, vocab], not {logits.dtype}")
    expected = {"seeds": torch.int64, "choices": torch.int32, "positions": torch.int32}
    for (name, dtype), tensor in zip(expected.items(), (seeds, choices, positions), strict=True):
        if tensor.shape != logits.shape[:1] or tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} [{logits.shape[0]}], one entry a row")


def _pick(
    logits: torch.Tensor, seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    tokens = torch.arange(logits.shape[1], device=logits.device)[None, :]
    uniform = _uniform(seeds, choices.long(), positions.long(), tokens).double()
    finite = logits.isfinite()
    scores = logits.double() - torch.log(-torch.log(uniform))
    scores.masked_fill_(~finite, float("-inf"))
    # argmax promises nothing about ties; the first of the maxima is wanted.
    is_best = scores == scores.amax(dim=1, keepdim=True)
    first = is_best.to(torch.uint8).cumsum(dim=1).eq(0).sum(dim=1)
    return torch.where(finite.any(dim=1), first, -1)


def _uniform(
    seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    # int64 [rows] x int64 [1, tokens] -> float32 [rows, tokens]
    zero = torch.zeros_like(tokens)
    counter = (tokens >> 2, positions[:, None] & _WORD, choices[:, None] & _WORD, zero)
    key = (seeds[:, None] & _WORD, (seeds[:, None] >> 32) & _WORD)
    words = torch.stack([word.expand(len(seeds), -1) for word in philox4x32(counter, key)])
    word = words.gather(0, (tokens & 3).expand(1, len(seeds), -1))[0]
    return word_to_uniform(word)
