"""The fit of a step's cost, against costs that are known because the steps were made from them."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.protocol.step_cost import StepCost, StepFeatures
from tidemill.service import step_fit
from tidemill.service.step_fit import fit_step_cost

TRUTH = StepCost(base=4e-3, per_token=21e-6, per_pair=0.8e-9, per_context=0.06e-6)


def make_steps(
    truth: StepCost, count: int, *, noise: float = 0.0, seed: int = 0
) -> list[StepFeatures]:
    """Steps of a busy worker: decodes, chunks of long prompts, or both."""
    random_ = random.Random(seed)
    steps = []
    for _ in range(count):
        decodes = random_.choice([0, 1, 4, 16, 64])
        chunk = random_.choice([0, 0, 64, 512, 2000]) if decodes else 2000
        start = random_.randrange(0, 16_000)
        step = StepFeatures(
            prefill_tokens=chunk,
            decode_tokens=decodes,
            prefill_pairs=chunk * start + chunk * (chunk - 1) // 2,
            context_tokens=decodes * random_.randrange(100, 8000),
        )
        seconds = truth.predict(step) * random_.lognormvariate(0.0, noise)
        steps.append(step.model_copy(update={"seconds": seconds}))
    return steps


def fit(steps: list[StepFeatures]) -> StepCost:
    fitted = fit_step_cost(steps)
    assert fitted is not None
    return fitted


def coefficients(cost: StepCost) -> tuple[float, float, float, float]:
    return cost.base, cost.per_token, cost.per_pair, cost.per_context


def test_exact_steps_give_the_exact_cost() -> None:
    assert coefficients(fit(make_steps(TRUTH, 60))) == pytest.approx(coefficients(TRUTH), rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_five_percent_moves_no_coefficient_by_ten(seed: int) -> None:
    fitted = fit(make_steps(TRUTH, 300, noise=0.05, seed=seed))
    assert coefficients(fitted) == pytest.approx(coefficients(TRUTH), rel=0.10)


@pytest.mark.parametrize("factor", [3.0, 10.0, 1000.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_fifth_of_outliers_changes_next_to_nothing(factor: float, seed: int) -> None:
    steps = make_steps(TRUTH, 300, noise=0.03, seed=seed)
    spoilt = [
        step.model_copy(update={"seconds": step.seconds * factor}) if index % 5 == 0 else step
        for index, step in enumerate(steps)
    ]
    assert coefficients(fit(spoilt)) == pytest.approx(coefficients(TRUTH), rel=0.10)


def test_a_cost_that_is_not_there_is_fitted_as_zero() -> None:
    truth = StepCost(base=0.0, per_token=30e-6, per_pair=0.0, per_context=0.1e-6)
    fitted = fit(make_steps(truth, 100))
    assert coefficients(fitted) == pytest.approx(coefficients(truth), rel=1e-6, abs=1e-15)


def test_no_coefficient_is_ever_negative_although_least_squares_would_have_it() -> None:
    # The longer the context the faster: unconstrained, that coefficient would be below zero.
    steps = [
        StepFeatures(decode_tokens=n, context_tokens=n * c, seconds=0.01 + 1e-4 * n - 1e-8 * n * c)
        for n in (1, 8, 32)
        for c in (10, 1000, 3000)
    ]
    fitted = fit(steps)
    assert min(coefficients(fitted)) >= 0
    assert fitted.per_context == 0


def test_what_the_steps_say_nothing_about_comes_from_the_prior() -> None:
    steps = [
        StepFeatures(decode_tokens=n, context_tokens=100 * n * n, seconds=0.002 + 1e-5 * n)
        for n in (1, 2, 4, 8, 16)
    ]
    prior = StepCost(per_pair=7e-9)
    fitted = fit_step_cost(steps, prior)
    assert fitted is not None
    assert fitted.per_pair == 7e-9
    assert (fitted.base, fitted.per_token) == pytest.approx((0.002, 1e-5))


def test_steps_that_are_all_alike_are_predicted_although_nothing_tells_their_costs_apart() -> None:
    step = StepFeatures(prefill_tokens=8, decode_tokens=4, prefill_pairs=28, seconds=0.02)
    assert fit([step] * 60).predict(step) == pytest.approx(0.02)


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("tokens", [1, 7, 512])
def test_steps_of_one_size_cost_what_is_known_of_each_term_at_their_speed(
    tokens: int, noise: float
) -> None:
    """Least squares alone puts all of their time down to one term, which makes the others free."""
    prior = StepCost(base=2e-3, per_token=50e-6, per_pair=3e-9, per_context=0.2e-6)
    truth = StepCost(base=40e-3, per_token=1e-3, per_pair=60e-9, per_context=4e-6)
    step = StepFeatures(
        prefill_tokens=tokens,
        decode_tokens=3,
        prefill_pairs=tokens * (tokens - 1) // 2 + tokens * 100,
        context_tokens=600,
    )
    random_ = random.Random(tokens)
    seconds = [truth.predict(step) * random_.lognormvariate(0.0, noise) for _ in range(60)]
    fitted = fit_step_cost([step.model_copy(update={"seconds": s}) for s in seconds], prior)
    assert fitted is not None
    assert coefficients(fitted) == pytest.approx(coefficients(truth), rel=1e-3 + noise)


def test_a_token_is_not_free_even_where_steps_of_all_sizes_take_as_long() -> None:
    steps = [StepFeatures(decode_tokens=n, context_tokens=n, seconds=0.01) for n in range(1, 65)]
    fitted = fit(steps)
    assert fitted.per_token > 0
    assert [fitted.predict(step) for step in steps] == pytest.approx([0.01] * 64, rel=0.02)


def test_a_known_cost_in_which_tokens_are_free_does_not_make_them_so() -> None:
    step = StepFeatures(prefill_tokens=8, prefill_pairs=28, seconds=0.02)
    fitted = fit_step_cost([step] * 60, StepCost(base=0.02, per_token=0.0, per_pair=0.0))
    assert fitted is not None
    assert fitted.per_token > 0
    assert fitted.predict(step) == pytest.approx(0.02)


def test_without_a_step_that_took_time_there_is_no_fit() -> None:
    assert fit_step_cost([]) is None
    assert fit_step_cost([StepFeatures(decode_tokens=3)]) is None


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(
        st.builds(
            StepFeatures,
            prefill_tokens=st.integers(0, 4000),
            decode_tokens=st.integers(0, 64),
            prefill_pairs=st.integers(0, 10**8),
            context_tokens=st.integers(0, 10**6),
            seconds=st.floats(1e-4, 1.0),
        ),
        min_size=6,
        max_size=30,
    )
)
def test_no_other_non_negative_cost_is_better(steps: list[StepFeatures]) -> None:
    """The conditions of Karush, Kuhn and Tucker, which only the best solution meets."""
    matrix = np.array([step_fit._relative_row(step) for step in steps])
    solution = np.array(step_fit._solve([tuple(row) for row in matrix]))
    assert solution.min() >= 0
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    slope = (matrix / scale).T @ (matrix @ solution - 1.0)
    tolerance = 1e-4 * len(steps) ** 0.5
    # No coefficient that is zero would help if it grew; the others cannot help either way.
    assert slope.min() >= -tolerance
    assert np.abs(slope[solution > 0]).max(initial=0.0) <= tolerance
