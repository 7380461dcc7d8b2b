"""`tidemill_kernels.randomness` in C++, for CPU tensors; same signatures, same results."""

import ctypes

import torch

from tidemill_kernels.randomness import check_rows


class NativeRandomness:
    """Seeded draws by a loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def philox_uniform(
        self, seed: int, choice: int, position: int, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return one uniform number per token; arguments as in `tidemill_kernels.randomness`."""
        tokens = token_ids.contiguous()
        out = torch.empty(tokens.shape, dtype=torch.float32)
        self._library.tidemill_philox_uniform(
            seed & (2**64 - 1), choice, position, tokens.data_ptr(), tokens.numel(), out.data_ptr()
        )
        return out

    def gumbel_argmax(
        self,
        logits: torch.Tensor,
        seeds: torch.Tensor,
        choices: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Sample a token per row; arguments as in `tidemill_kernels.randomness`."""
        check_rows(logits, seeds, choices, positions)
        rows, vocab = logits.shape
        if vocab and logits.stride(1) != 1:
            logits = logits.contiguous()
        # Named, so that a copy made here lives until the call returns.
        keys = [tensor.contiguous() for tensor in (seeds, choices, positions)]
        out = torch.empty(rows, dtype=torch.int64)
        self._library.tidemill_gumbel_argmax(
            *(logits.data_ptr(), logits.stride(0), rows, vocab),
            *(key.data_ptr() for key in keys),
            *(out.data_ptr(), torch.get_num_threads()),
        )
        return out
