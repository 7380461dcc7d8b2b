"""Two systems' outputs for the same prompts: what is equal, and what excuses a difference."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from gsm8k_questions import Question, answer_of, num_equal

#: Logits closer than this may come out in either order: float32 sums depend on the batch's shape.
NEAR_TIE = 1e-4


@dataclass(frozen=True)
class Output:
    """What a system said: ids, with the one that ended it, and the text before the stop."""

    ids: tuple[int, ...]
    text: str

    @property
    def answer(self) -> Decimal | None:
        """The number that the text gives."""
        return answer_of(self.text)


@dataclass(frozen=True)
class Divergence:
    """Where two outputs part, and by how much the reference's two largest logits differ there.

    ``gap`` is None where one of them ended, or ours is not the reference's second choice.
    """

    question: int
    position: int
    gap: float | None

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding alone explains it."""
        return self.gap is not None and self.gap < NEAR_TIE


@dataclass(frozen=True)
class Summary:
    """How many of ``num_questions`` are equal in which way, and how many each system solved."""

    num_questions: int
    num_equal_answers: int
    num_equal_texts: int
    num_equal_ids: int
    num_tokens: int
    num_solved: int
    num_solved_by_reference: int
    divergences: tuple[Divergence, ...]

    @property
    def is_exact(self) -> bool:
        """Whether all ids are equal but for near-ties."""
        return all(divergence.is_near_tie for divergence in self.divergences)


def parting(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the first place at which two outputs differ, None if they are equal."""
    position = num_equal(ours, theirs)
    return position if position < max(len(ours), len(theirs)) else None


def summarise(
    questions: Sequence[Question],
    ours: Sequence[Output],
    theirs: Sequence[Output],
    divergences: Sequence[Divergence],
) -> Summary:
    """Count what is equal and what is right."""
    pairs = list(zip(ours, theirs, strict=True))
    return Summary(
        num_questions=len(questions),
        num_equal_answers=sum(a.answer == b.answer for a, b in pairs),
        num_equal_texts=sum(a.text == b.text for a, b in pairs),
        num_equal_ids=sum(a.ids == b.ids for a, b in pairs),
        num_tokens=sum(len(b.ids) for b in theirs),
        num_solved=_num_solved(questions, ours),
        num_solved_by_reference=_num_solved(questions, theirs),
        divergences=tuple(divergences),
    )


def _num_solved(questions: Sequence[Question], outputs: Sequence[Output]) -> int:
    pairs = zip(questions, outputs, strict=True)
    return sum(output.answer == question.solution for question, output in pairs)
