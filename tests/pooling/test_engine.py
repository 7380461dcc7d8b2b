"""The pooling engine's steps, with an encoder whose rows name their inputs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidemill.protocol.outcomes import Outcome
from tidemill.service.job_inputs import EncoderInput
from tidemill_gpuworker.pooling.batches import buckets, take
from tidemill_gpuworker.pooling.engine import PoolingEngine
from tidemill_gpuworker.pooling.job import PoolingJob


class NamingEncoder:
    """Gives each input its first token as its row, and remembers the batches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.fails = False

    def rows(self, batch: list[EncoderInput]) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("planted")
        self.batches.append([len(item.ids) for item in batch])
        return torch.tensor([[float(item.ids[0])] for item in batch])


def finish(rows: torch.Tensor) -> Outcome:
    return Outcome(scores=tuple(rows[:, 0].tolist()))


def make_job(name: str, *lengths: int, priority: int = 0) -> PoolingJob:
    inputs = [EncoderInput((index,) * length) for index, length in enumerate(lengths)]
    return PoolingJob(name, inputs, finish, priority)


def test_rows_come_back_in_the_order_of_the_inputs_whatever_their_lengths() -> None:
    engine = PoolingEngine(NamingEncoder(), 1000)
    engine.add(make_job("a", 90, 1, 50, 2, 70))
    [output] = engine.step()
    assert output.outcome == Outcome(scores=(0.0, 1.0, 2.0, 3.0, 4.0), input_tokens=213)
    assert not engine.has_work


def test_a_step_takes_no_more_tokens_than_its_budget_and_several_jobs() -> None:
    encoder = NamingEncoder()
    engine = PoolingEngine(encoder, 10)
    engine.add(make_job("a", 4, 4, 4))
    engine.add(make_job("b", 4))
    assert engine.step() == []
    assert {output.seq.seq_id for output in engine.step()} == {"a", "b"}
    assert encoder.batches == [[4, 4], [4, 4]]
    assert engine.figures.num_prompt_tokens == 16


def test_interactive_jobs_go_before_batch_jobs_that_came_earlier() -> None:
    engine = PoolingEngine(NamingEncoder(), 4)
    for name, priority in (("batch", 1), ("standard", 0), ("interactive", -1)):
        engine.add(make_job(name, 4, priority=priority))
    assert engine.step_scheduler.num_waiting_tokens == 12
    assert engine.step_scheduler.num_urgent_tokens == 4
    ended = [engine.step()[0].seq.seq_id for _ in range(3)]
    assert ended == ["interactive", "standard", "batch"]
    assert engine.step_scheduler.num_waiting_tokens == 0


def test_a_step_that_fails_never_happened() -> None:
    encoder = NamingEncoder()
    engine = PoolingEngine(encoder, 100)
    engine.add(make_job("a", 3, 5))
    encoder.fails = True
    try:
        engine.step()
        raise AssertionError("the step must raise")
    except RuntimeError:
        encoder.fails = False
    assert engine.step()[0].outcome.scores == (0.0, 1.0)


def test_an_aborted_job_takes_its_tokens_with_it() -> None:
    engine = PoolingEngine(NamingEncoder(), 4)
    engine.add(make_job("a", 4, 4))
    engine.step()
    job = engine.abort("a")
    assert job is not None and job.num_left_tokens == 4
    assert not engine.has_work and engine.step_scheduler.num_waiting_tokens == 0
    assert engine.abort("a") is None


@given(st.lists(st.integers(1, 512), min_size=1, max_size=200))
def test_every_input_is_in_one_bucket_and_few_tokens_are_padding(lengths: list[int]) -> None:
    found = buckets(lengths)
    assert sorted(index for bucket in found for index in bucket) == list(range(len(lengths)))
    for bucket in found:
        sizes = [lengths[index] for index in bucket]
        assert max(sizes) <= 1.25 * min(sizes) + 8


@given(st.lists(st.integers(1, 512), min_size=1, max_size=50), st.integers(1, 2000))
def test_what_a_step_takes_fits_unless_it_is_a_single_input(
    lengths: list[int], budget: int
) -> None:
    count = take(lengths, budget)
    assert count == 1 or sum(lengths[:count]) <= budget
    assert count == len(lengths) or sum(lengths[: count + 1]) > budget


def test_a_row_that_is_no_number_fails_the_step_and_names_its_job() -> None:
    class Overflowing(NamingEncoder):
        def rows(self, batch: list[EncoderInput]) -> torch.Tensor:
            rows = super().rows(batch)
            return torch.where(rows == 2, torch.nan, rows)

    engine = PoolingEngine(Overflowing(), 100)
    engine.add(make_job("good", 3))
    engine.add(make_job("bad", 4, 5, 6))

    with pytest.raises(ArithmeticError, match="no finite rows for bad"):
        engine.step()
    engine.abort("bad")

    [output] = engine.step()
    assert output.seq.seq_id == "good", "the step that failed never happened"
