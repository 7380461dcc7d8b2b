"""What the outputs of a tenant's next jobs are expected to come to."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill_scheduler.intake.jobs import WaitingJob
from tidemill_scheduler.policy.output_lengths import OutputLengths


def job(tenant: str = "t", max_tokens: int = 0) -> WaitingJob:
    return WaitingJob("job_00x", f"p1:{tenant}", "1-0", "m", max_tokens=max_tokens)


@pytest.mark.parametrize(("max_tokens", "expected"), [(0, 256), (100, 50), (1, 1), (4_000, 256)])
def test_half_of_a_bound_or_256_tokens_are_expected_before_anything_is_known(
    max_tokens: int, expected: int
) -> None:
    assert OutputLengths().expected(job(max_tokens=max_tokens)) == expected


@given(tokens=st.lists(st.integers(0, 10_000), min_size=1, max_size=32))
def test_the_first_outputs_count_alike(tokens: list[int]) -> None:
    lengths = OutputLengths()
    for number in tokens:
        lengths.observe("t", number)
    expected = lengths.expected(job())
    assert expected == pytest.approx(max(1.0, statistics.fmean(tokens)), abs=0.5001)


def test_a_bound_of_the_job_goes_before_the_mean() -> None:
    lengths = OutputLengths()
    lengths.observe("t", 700)
    assert lengths.expected(job(max_tokens=50)) == 50
    assert lengths.expected(job(max_tokens=5_000)) == 700


def test_what_a_tenant_does_now_outweighs_what_it_did() -> None:
    lengths = OutputLengths()
    for _ in range(500):
        lengths.observe("t", 1_000)
    for _ in range(100):
        lengths.observe("t", 10)
    # (31/32)^100 of the difference is left.
    assert lengths.expected(job()) == pytest.approx(10 + 990 * (31 / 32) ** 100, abs=1)


def test_tenants_are_told_apart() -> None:
    lengths = OutputLengths()
    lengths.observe("chatty", 900)
    lengths.observe("terse", 2)
    assert (lengths.expected(job("chatty")), lengths.expected(job("terse"))) == (900, 2)


def test_a_new_tenant_is_taken_for_the_mean_of_all() -> None:
    lengths = OutputLengths()
    lengths.observe("chatty", 900)
    lengths.observe("terse", 100)
    assert lengths.expected(job("new")) == 500
    assert lengths.expected(job("new", max_tokens=20)) == 20


def test_the_tenants_that_finished_nothing_for_longest_are_forgotten() -> None:
    lengths = OutputLengths()
    for number in range(10_000):
        lengths.observe(f"t{number}", 7)
    lengths.observe("t0", 7)
    lengths.observe("one-more", 7)
    assert len(lengths) == 10_000
    lengths.observe("t0", 90)
    # The mean of all has seen 90 last; what is known of one tenant has not.
    assert lengths.expected(job("t0")) == round((7 + 7 + 90) / 3)
    assert lengths.expected(job("t1")) == round(7 + (90 - 7) / 32)
    assert lengths.expected(job("t2")) == 7
