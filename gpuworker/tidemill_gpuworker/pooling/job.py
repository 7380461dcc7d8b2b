"""A job of kind embed or score inside its engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tidemill.protocol.outcomes import Outcome, Vectors
from tidemill.protocol.requests import EmbedRequest, ScoreRequest
from tidemill.service.job_inputs import EncoderInput
from tidemill_gpuworker.engine.sequence import PriorityClass


@dataclass(slots=True, eq=False)
class PoolingJob:
    """One job's inputs, and a row [size] for each of those that went through the model.

    ``finish`` makes the result of all rows [inputs, size].
    """

    seq_id: str
    inputs: Sequence[EncoderInput]
    finish: Callable[[torch.Tensor], Outcome]
    priority: int = 0
    rows: list[torch.Tensor] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_resumed_tokens: int = 0
    output_ids: tuple[int, ...] = ()

    #: Tokens of all inputs, and of those that have no row yet.
    num_prompt_tokens: int = field(init=False)
    num_left_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = sum(len(item.ids) for item in self.inputs)
        self.num_left_tokens = self.num_prompt_tokens

    @property
    def left(self) -> Sequence[EncoderInput]:
        """The inputs that have no row yet."""
        return self.inputs[len(self.rows) :]

    def take(self, row: torch.Tensor) -> None:
        """Take in the row of the next input."""
        self.num_left_tokens -= len(self.inputs[len(self.rows)].ids)
        self.rows.append(row)

    @property
    def priority_class(self) -> PriorityClass:
        """The class of the job's priority."""
        if self.priority > 0:
            return PriorityClass.BATCH
        return PriorityClass.INTERACTIVE if self.priority else PriorityClass.STANDARD

    def outcome(self) -> Outcome:
        """Return the result; all inputs have their rows."""
        outcome = self.finish(torch.stack(self.rows))
        return outcome.model_copy(update={"input_tokens": self.num_prompt_tokens})


def embed_finish(request: EmbedRequest) -> Callable[[torch.Tensor], Outcome]:
    """Return what makes vectors of pooled rows: cut to the dimensions, then normalised."""

    def finish(rows: torch.Tensor) -> Outcome:
        rows = rows[:, : request.dimensions] if request.dimensions else rows
        return Outcome(vectors=pack(normalized(rows) if request.normalize else rows))

    return finish


def cosine_finish(rows: torch.Tensor) -> Outcome:
    """Score by the cosine between the first row, the query's, and each other one."""
    query, *documents = normalized(rows).unbind()
    return Outcome(scores=tuple(float(query @ document) for document in documents))


def score_finish(
    request: ScoreRequest, activation: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], Outcome]:
    """Return what makes scores of a cross-encoder's rows [documents, 1]."""

    def finish(rows: torch.Tensor) -> Outcome:
        scores = activation(rows[:, 0]) if request.activate else rows[:, 0]
        return Outcome(scores=tuple(scores.tolist()))

    return finish


def normalized(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of length 1; a row of zeros stays one."""
    return torch.nn.functional.normalize(rows, dim=-1)


def pack(rows: torch.Tensor) -> Vectors:
    """Pack rows [count, size] as the wire has them."""
    numbers = rows.to(torch.float32).cpu().contiguous().numpy().astype("<f4", copy=False)
    return Vectors(num_rows=rows.shape[0], size=rows.shape[1], data=numbers.tobytes())
