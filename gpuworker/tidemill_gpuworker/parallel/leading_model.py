"""The leader's part of a model, which the other ranks compute together with it."""

import torch

from tidemill_gpuworker.engine.inputs import StepInputs
from tidemill_gpuworker.loading.model_choice import Model, Part
from tidemill_gpuworker.memory.block_copier import BlockCopier
from tidemill_gpuworker.memory.block_copies import BlockCopies
from tidemill_gpuworker.memory.kv_cache import KVCache
from tidemill_gpuworker.parallel.followers import Followers
from tidemill_kernels import AttentionBackend


class LeadingModel:
    """Tells the ranks what to compute, then computes its own part.

    Raises ``EngineFailed`` if anything fails: the ranks stand in the middle of a step then.  On
    GPUs a rank that goes is not seen where its tensors are waited for, so logits are handed out
    once they are there, if all ranks still are.
    """

    def __init__(self, model: Part, vocab_size: int, followers: Followers) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._followers = followers

    def __call__(
        self, inputs: StepInputs, cache: KVCache, backend: AttentionBackend
    ) -> torch.Tensor:
        """Run a step as the whole model would."""
        self._followers.begin_step(inputs)
        try:
            return self._model(inputs, cache, backend)
        except Exception as error:
            raise self._followers.failed(error) from error

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [rows, vocabulary] of some rows of the hidden states."""
        if not len(hidden):
            return hidden.new_empty(0, self._vocab_size, dtype=torch.float32)
        if self._model.head_is_split:
            self._followers.begin_logits(hidden)
        try:
            logits = self._compute_logits(hidden)
            if logits.is_cuda:
                torch.cuda.synchronize(logits.device)
        except Exception as error:
            raise self._followers.failed(error) from error
        self._followers.check()
        return logits

    def _compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._model.head_is_split:
            hidden = self._followers.collectives.share_rows(hidden)
        return self._model.logits(hidden)


class LeadingCopier:
    """Copies blocks on all ranks."""

    def __init__(self, copier: BlockCopier, followers: Followers) -> None:
        self._copier = copier
        self._followers = followers

    def run(self, copies: BlockCopies) -> None:
        """Make the copies as ``BlockCopier`` does."""
        self._followers.copy(copies)
        try:
            self._copier.run(copies)
        except Exception as error:
            raise self._followers.failed(error) from error


def lead(model: Part, vocab_size: int, followers: Followers) -> Model:
    """Return the model as the leader runs it."""
    if followers.place.is_whole:
        return model
    return LeadingModel(model, vocab_size, followers)
