"""Which beams go on and which are complete."""

import math

import pytest

from tidemill.protocol.sampling import MAX_LENGTH_PENALTY
from tidemill_gpuworker.engine.beam_choice import Beam, BeamChoice

EOS = 0


def make_choice(width: int = 2, **options: object) -> BeamChoice:
    fields = {"prompt_len": 3, "max_tokens": 4, "eos_token_ids": [EOS]} | options
    return BeamChoice(width, **fields)  # type: ignore[arg-type]


def test_the_likeliest_beams_go_on_whoever_they_come_from() -> None:
    choice = make_choice()
    choice.advance([[(5, -0.1), (6, -2.0)]])
    heirs = choice.advance([[(7, -0.2), (8, -0.3)], [(7, -0.1), (8, -5.0)]])
    assert [(heir.parent, heir.beam.ids) for heir in heirs] == [(0, (5, 7)), (0, (5, 8))]
    assert choice.beams[0] == Beam((5, 7), pytest.approx(-0.3))


def test_no_more_tokens_count_than_twice_the_width() -> None:
    choice = make_choice(width=1)
    choice.advance([[(5, -1.0), (6, -2.0), (EOS, -3.0)]])
    assert choice.beams == (Beam((5,), -1.0),)
    assert not choice.best(1)


def test_an_output_with_eos_is_complete_and_takes_no_place() -> None:
    choice = make_choice()
    choice.advance([[(EOS, -0.1), (5, -0.2), (6, -0.3)]])
    assert [beam.ids for beam in choice.beams] == [(5,), (6,)]
    assert choice.best(2) == [Beam((EOS,), -0.1)]


def test_the_length_counts_the_prompt_and_not_the_eos() -> None:
    choice = make_choice()
    assert choice.score(Beam((5, 6), -10.0)) == -2.0
    assert choice.score(Beam((5, EOS), -10.0)) == -2.5
    assert make_choice(length_penalty=2.0).score(Beam((5, 6), -10.0)) == pytest.approx(-0.4)
    assert make_choice(length_penalty=0.0).score(Beam((5, 6), -10.0)) == -10.0


@pytest.mark.parametrize("length_penalty", [MAX_LENGTH_PENALTY, -MAX_LENGTH_PENALTY])
def test_beams_are_told_apart_at_both_limits_of_the_penalty(length_penalty: float) -> None:
    choice = make_choice(prompt_len=100_000_000, length_penalty=length_penalty)
    likely, unlikely = (choice.score(Beam((5, 6), logprob)) for logprob in (-1e-6, -1e4))
    assert -math.inf < unlikely < likely < 0.0


def test_the_search_ends_at_the_longest_output() -> None:
    choice = make_choice(max_tokens=2)
    choice.advance([[(5, -0.1), (6, -0.2)]])
    assert not choice.is_over
    assert choice.advance([[(5, -0.1), (6, -0.9)]] * 2) == []
    assert choice.is_over
    assert [beam.ids for beam in choice.best(2)] == [(5, 5), (6, 5)]


def test_it_ends_when_no_beam_is_left() -> None:
    choice = make_choice(width=1)
    choice.advance([[(EOS, -0.1)]])
    assert choice.is_over
    assert choice.best(1) == [Beam((EOS,), -0.1)]


#: After the first step two outputs are complete after the second, rated -1.0 and -3.0 or so.
FIRST = [[(EOS, -3.0), (5, -0.5)]]
SECOND = [[(EOS, -0.5), (6, -1.0), (7, -9.0)]]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "is_over"),
    [
        # The beam (5, 6) is rated -1.5 / 5, better than the worse complete one, -3.0 / 3.
        (True, 1.0, True),
        (False, 1.0, False),
        ("never", 1.0, False),
        # Rated -1.5 / 5 ** -2 it can no more: -37.5 against -3.0 / 3 ** -2 = -27.0.
        (False, -2.0, True),
        ("never", -2.0, True),
    ],
)
def test_early_stopping_says_when_to_look_for_no_more(
    early_stopping: bool | str, length_penalty: float, is_over: bool
) -> None:
    choice = make_choice(early_stopping=early_stopping, length_penalty=length_penalty)
    choice.advance(FIRST)
    assert not choice.is_over
    choice.advance(SECOND)
    assert choice.is_over is is_over


def test_never_counts_with_the_length_that_a_beam_may_reach() -> None:
    # Complete: -0.4 / 3 and -0.6 / 4; the beam is rated -0.9 / 5 now and -0.9 / 103 at most.
    for early_stopping, is_over in ((False, True), ("never", False)):
        choice = make_choice(max_tokens=100, early_stopping=early_stopping)
        choice.advance([[(EOS, -0.4), (5, -0.5)]])
        choice.advance([[(EOS, -0.1), (6, -0.4)]])
        assert choice.is_over is is_over
