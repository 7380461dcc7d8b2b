import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.protocol.step_cost import StepCost, StepFeatures
from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.simulation.decoding import DecodeBatch
from tidemill_scheduler.simulation.sequence import Sequence


def make_sequence(
    number: int, input_tokens: int, output_tokens: int, priority: int = 0
) -> Sequence:
    job = WaitingJob(
        f"job{number}", "p1:default", "1-0", "sim", cost=input_tokens, priority=priority
    )
    return Sequence(job, output_tokens, number, "1-1")


def make_batch(lengths: list[tuple[int, int]], cost: StepCost | None = None) -> DecodeBatch:
    batch = DecodeBatch(cost or StepCost())
    for number, (input_tokens, output_tokens) in enumerate(lengths):
        batch.add(make_sequence(number, input_tokens, output_tokens))
    return batch


def seconds_step_by_step(lengths: list[tuple[int, int]], steps: int) -> float:
    total = 0.0
    for step in range(steps):
        context = sum(length + 1 + step for length, _ in lengths)
        total += StepCost().predict(
            StepFeatures(decode_tokens=len(lengths), context_tokens=context)
        )
    return total


def test_many_steps_take_as_long_as_the_single_ones() -> None:
    lengths = [(100, 50), (2000, 90), (1, 1000)]

    assert make_batch(lengths).seconds(49) == pytest.approx(seconds_step_by_step(lengths, 49))


def test_sequences_end_in_the_step_of_their_last_token() -> None:
    batch = make_batch([(10, 5), (10, 3), (10, 5)])

    assert batch.steps_to_end() == 2
    batch.advance(2)
    assert [seq.number for seq in batch.pop_ended()] == [1]
    assert batch.steps_to_end() == 2
    batch.advance(2)
    assert [seq.number for seq in batch.pop_ended()] == [0, 2]
    assert (batch.count, batch.context, batch.num_prompt) == (0, 0, 0)


def test_a_cancelled_sequence_leaves_nothing_behind() -> None:
    batch = DecodeBatch(StepCost())
    kept, dropped = make_sequence(0, 10, 9), make_sequence(1, 20, 30, priority=1)
    batch.add(kept)
    batch.add(dropped)
    batch.advance(3)
    batch.cancel(dropped)

    assert (batch.count, batch.context, batch.num_prompt) == (1, 10 + 1 + 3, 1)
    batch.advance(batch.steps_to_end())
    assert batch.pop_ended() == [kept]


def test_a_pause_holds_the_batch_class_where_it_is_and_lets_the_others_go_on() -> None:
    batch = DecodeBatch(StepCost())
    watched, bulk = make_sequence(0, 10, 4), make_sequence(1, 20, 3, priority=1)
    batch.add(watched)
    batch.add(bulk)
    batch.advance(1)
    batch.pause(2)
    assert (batch.count, batch.context, batch.num_prompt) == (1, 10 + 1 + 1, 1)
    batch.advance(1)
    batch.advance(1)
    assert batch.pop_ended() == [watched]

    batch.resume()

    assert (batch.count, batch.context, batch.num_prompt) == (1, 20 + 1 + 1, 0)
    assert batch.steps_to_end() == 1
    batch.advance(1)
    assert batch.pop_ended() == [bulk]
    assert (batch.count, batch.context, batch.num_prompt) == (0, 0, 0)


def test_what_comes_and_goes_during_a_pause_counts_after_it() -> None:
    batch = DecodeBatch(StepCost())
    first, second = (make_sequence(number, 20, 9, priority=1) for number in (0, 1))
    batch.add(first)
    batch.pause(5)
    batch.add(second)
    batch.advance(1)
    assert (batch.count, batch.context) == (0, 0)
    batch.cancel(first)

    batch.resume()

    assert (batch.count, batch.context) == (1, 20 + 1)
    assert batch.steps_to_end() == 8


def test_so_many_steps_in_a_row_are_paused_and_no_more() -> None:
    batch = DecodeBatch(StepCost())
    batch.add(make_sequence(0, 20, 99, priority=1))
    paused = []
    for _ in range(7):
        batch.resume()
        batch.pause(2)
        paused.append(batch.is_paused)
        batch.advance(1)

    assert paused == [True, True, False, True, True, False, True]


@given(
    st.lists(st.integers(1, 100_000), min_size=1, max_size=50),
    st.integers(1, 3000),
    st.floats(0.01, 1.0),
)
def test_the_steps_within_a_time_are_the_fewest_that_cover_it(
    lengths: list[int], steps: int, share: float
) -> None:
    batch = make_batch([(length, 5000) for length in lengths])
    begun = batch.seconds(steps - 1) if steps > 1 else 0.0
    time = begun + share * (batch.seconds(steps) - begun)

    found = batch.steps_within(time)

    assert batch.seconds(found) >= time
    assert found == 1 or batch.seconds(found - 1) < time


def test_steps_that_attend_to_nothing_are_counted_too() -> None:
    batch = make_batch([(10, 100)], StepCost(base=0.5, per_token=0, per_pair=0, per_context=0))

    assert batch.steps_within(1.2) == 3
