"""How jobs of the kinds embed and score come into the pooling engine."""

import torch

from tidemill.protocol.messages import ModelCard
from tidemill.protocol.outcomes import Outcome
from tidemill.protocol.requests import EmbedRequest, Request, ScoreRequest
from tidemill.service.job_inputs import EncoderInput, encoder_inputs
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.engine.generated import Generated
from tidemill_gpuworker.engine.kind_work import KindJob
from tidemill_gpuworker.pooling.encoder import Activation
from tidemill_gpuworker.pooling.job import PoolingJob, cosine_finish, embed_finish, score_finish


class PoolingWork:
    """Makes pooling jobs of claims; ``activation`` is the one of a cross-encoder's scores."""

    def __init__(self, card: ModelCard, tokenizer: Tokenizer, activation: Activation) -> None:
        self._card = card
        self._tokenizer = tokenizer
        self._activation = activation

    def prepare(self, request: Request) -> tuple[EncoderInput, ...]:
        """Tokenise and check; raises ``InvalidRequest``."""
        assert isinstance(request, EmbedRequest | ScoreRequest), "the model serves no other kind"
        return encoder_inputs(request, self._tokenizer, self._card)

    def start(self, given: KindJob, generated: Generated) -> PoolingJob:
        """Return the job; what an earlier attempt computed was never told and is lost."""
        request = given.request
        if isinstance(request, EmbedRequest):
            finish = embed_finish(request)
        elif self._card.task == "score":
            assert isinstance(request, ScoreRequest), "the model serves no other kind"
            finish = score_finish(request, self._activation)
        else:
            finish = cosine_finish
        return PoolingJob(given.job_id, given.inputs, finish, request.priority)

    def smallest(self, seq_id: str) -> PoolingJob:
        """Return a job of one token."""
        return PoolingJob(seq_id, (EncoderInput((0,)),), _nothing)


def _nothing(rows: torch.Tensor) -> Outcome:
    return Outcome()
