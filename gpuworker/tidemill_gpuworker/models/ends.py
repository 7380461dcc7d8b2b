"""What comes before the first layer of a decoder and after the last one."""

import logging

import torch
from torch.nn import functional

from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.loading.model_config import ModelConfig
from tidemill_gpuworker.models.linear import make_linear
from tidemill_gpuworker.models.norms import load_norm
from tidemill_gpuworker.parallel.collectives import Collectives
from tidemill_gpuworker.parallel.shard import Section

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"

_log = logging.getLogger(__name__)


class Embedding:
    """The vectors of the tokens; every rank of the first stage has all of them."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        name = _embedding_name(config, checkpoint)
        self.weight = checkpoint.tensor(name, config.vocab_size, config.hidden_size)
        # Rounded to the model's dtype, as transformers does.
        self._multiplier = float(torch.tensor(config.embedding_multiplier).to(self.weight))

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return a new [tokens, hidden] tensor."""
        x = functional.embedding(token_ids, self.weight)
        return x if self._multiplier == 1.0 else x.mul_(self._multiplier)


class Head:
    """From hidden states to logits, each rank of the first stage for a part of the vocabulary.

    Where the vocabulary has no equal parts, the leader computes all of it.
    """

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, embedding: Embedding, ranks: Collectives
    ) -> None:
        self._norm = load_norm(config, checkpoint, "model.norm", config.hidden_size)
        self.is_split = splits_vocabulary(config)
        self._project = make_linear(_head_weight(config, checkpoint, embedding))
        self._divisor = config.logits_divisor
        self._soft_cap = config.final_soft_cap
        self._ranks = ranks

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [rows, vocabulary]; on ranks that do not lead, of a part of it."""
        logits = self._project(self._norm(hidden)).float()
        if self.is_split:
            logits = self._ranks.put_together(logits)
        if self._divisor != 1.0:
            logits.div_(self._divisor)
        if self._soft_cap:
            logits.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        return logits


def splits_vocabulary(config: ModelConfig) -> bool:
    """Whether each rank computes the logits of a part of the vocabulary."""
    return not config.shard.is_whole and config.vocab_size % config.shard.count == 0


def _embedding_name(config: ModelConfig, checkpoint: Checkpoint) -> str:
    # Of two that are one the files may hold either.
    is_head = config.tie_word_embeddings and not checkpoint.holds(_EMBEDDING)
    return _HEAD if is_head and checkpoint.holds(_HEAD) else _EMBEDDING


def _head_weight(config: ModelConfig, checkpoint: Checkpoint, embedding: Embedding) -> torch.Tensor:
    is_tied = _is_tied(config, checkpoint)
    if not splits_vocabulary(config):
        if is_tied:
            return embedding.weight
        return checkpoint.tensor(_HEAD, config.vocab_size, config.hidden_size)
    part = Section(config.vocab_size // config.shard.count, config.shard)
    if is_tied:
        return embedding.weight.narrow(0, part.start, part.size)
    return checkpoint.part(_HEAD, 0, [part], config.hidden_size)


def _is_tied(config: ModelConfig, checkpoint: Checkpoint) -> bool:
    """Whether the head is the embedding: as in transformers 5, not if the files hold another."""
    if not config.tie_word_embeddings:
        return False
    if not (checkpoint.holds(_HEAD) and checkpoint.holds(_EMBEDDING)):
        return True
    if checkpoint.are_equal(_HEAD, _EMBEDDING):
        checkpoint.skip([_HEAD])
        return True
    _log.warning(
        "config.json makes the embedding the output head (tie_word_embeddings), but the files hold"
        " another %s, which is used",
        _HEAD,
    )
    return False
