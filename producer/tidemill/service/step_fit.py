"""Fits the coefficients of a ``StepCost`` to steps that were measured.

Non-negative least squares (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23)
over four coefficients: the best fit makes some of them zero and is an ordinary least-squares
solution in the others, so that all fifteen subsets can be tried.  Errors count relative to the
measured time: a step of 2 ms is to be predicted as well as one of 200 ms.

Outliers, such as a step that compiled a kernel or was interrupted, are trimmed: samples whose error
is more than three standard deviations, estimated as 1.4826 times the median of the absolute errors,
are left out and the fit repeated until no more change, eight times at most.  Errors below one
percent are never an outlier's.  This stands as long as clearly more than half of the samples obey
one cost.

Steps may leave it open which coefficient their time is due to: those of one size all fit a constant
as well as a cost for each token.  So the last solution is a ridge regression (Hoerl and Kennard,
1970) towards a cost that is known before, scaled to the speed of the steps.  That a coefficient is
off by a factor of two there weighs as much as one sample's error, which the residuals tell; where
the steps say what it is, hundreds of samples outweigh that.
"""

from collections.abc import Sequence
from itertools import combinations
from statistics import median

from tidemill.protocol.step_cost import StepCost, StepFeatures

_MAX_ROUNDS = 8
_DEVIATIONS = 3.0
#: Of the median absolute deviation of a normal distribution to its standard deviation.
_MAD_TO_SIGMA = 1.4826
_LEAST_SPREAD = 0.01
#: Below this share of a column's length, what is left of it behind the others is rounding.
_PIVOT = 1e-12
#: Squared error, for each sample, that is taken to be there at least, so that what steps leave open
#: is decided even if they fit to the last digit; well above the pivot.
_LEAST_VARIANCE = 1e-11
#: The cost of a token is at least this share of what is known before: none is free.
_LEAST_SHARE = 0.01

#: Values of the four features, or of their coefficients.
_Row = tuple[float, float, float, float]
_SUBSETS = tuple(subset for size in range(1, 5) for subset in combinations(range(4), size))


def fit_step_cost(steps: Sequence[StepFeatures], prior: StepCost | None = None) -> StepCost | None:
    """Return the cost that predicts ``steps`` best; None if none of them took any time.

    A coefficient about which the steps say nothing, because none had its feature, is taken from
    ``prior``, by default the cost that nobody measured; one about which they say little is near
    that, at the speed of the steps.  The cost of a token is never zero.
    """
    rows = [_relative_row(step) for step in steps if step.seconds > 0]
    if not rows:
        return None
    known = _values(prior or StepCost())
    likely = _scaled(known, rows)
    fitted = _lean(_without_outliers(rows), likely)
    seen = [any(row[column] for row in rows) for column in range(4)]
    chosen = [new if has else old for new, old, has in zip(fitted, known, seen, strict=True)]
    per_token = max(chosen[1], _LEAST_SHARE * likely[1])
    return StepCost(base=chosen[0], per_token=per_token, per_pair=chosen[2], per_context=chosen[3])


def _values(cost: StepCost) -> _Row:
    """The coefficients; where one is zero, as nobody can lean on that, of the default cost."""
    default = StepCost()
    return (
        cost.base or default.base,
        cost.per_token or default.per_token,
        cost.per_pair or default.per_pair,
        cost.per_context or default.per_context,
    )


def _scaled(known: _Row, rows: list[_Row]) -> _Row:
    """The known coefficients times how much slower the steps are, by the median of them."""
    speed = median(_dot(known, row) for row in rows)
    base, per_token, per_pair, per_context = (value / speed for value in known)
    return base, per_token, per_pair, per_context


def _lean(rows: list[_Row], likely: _Row) -> _Row:
    """Solve once more, with what is known before as a sample for each coefficient."""
    solution = _solve(rows)
    squares = sum((1.0 - _dot(solution, row)) ** 2 for row in rows)
    variance = max(squares / len(rows), _LEAST_VARIANCE * len(rows))
    return _solve(rows, likely, variance)


def _relative_row(step: StepFeatures) -> _Row:
    scale = 1.0 / step.seconds
    tokens = step.prefill_tokens + step.decode_tokens
    return scale, tokens * scale, step.prefill_pairs * scale, step.context_tokens * scale


def _without_outliers(rows: list[_Row]) -> list[_Row]:
    kept = rows
    for _ in range(_MAX_ROUNDS):
        solution = _solve(kept)
        errors = [abs(1.0 - _dot(solution, row)) for row in rows]
        bound = max(_DEVIATIONS * _MAD_TO_SIGMA * median(errors), _LEAST_SPREAD)
        within = [row for row, error in zip(rows, errors, strict=True) if error <= bound]
        if len(within) == len(kept) and all(a is b for a, b in zip(within, kept, strict=True)):
            break
        kept = within
    return kept


def _solve(rows: list[_Row], likely: _Row | None = None, variance: float = 0.0) -> _Row:
    """Return the four coefficients, none negative, with the least sum of squared errors.

    A coefficient that is 100 % off its ``likely`` value counts as ``variance`` of squared error.
    """
    gram, target = _normal_equations(rows)
    for column, value in enumerate(likely or ()):
        gram[column][column] += variance / value**2
        target[column] += variance / value
    best: _Row = (0.0, 0.0, 0.0, 0.0)
    least = 0.0
    for subset in _SUBSETS:
        solution = _solve_subset(gram, target, subset)
        if solution is None or min(solution) < 0:
            continue
        # Of the squared error, what depends on the solution: it is minimal, so b'Gb = b't.
        error = -sum(value * target[column] for value, column in zip(solution, subset, strict=True))
        # A larger set that gains nothing but rounding is no better.
        if error < least - 1e-12 * len(rows):
            best, least = _spread(solution, subset), error
    return best


def _normal_equations(rows: list[_Row]) -> tuple[list[list[float]], list[float]]:
    columns = list(zip(*rows, strict=True))
    gram = [[_dot(left, right) for right in columns] for left in columns]
    return gram, [sum(column) for column in columns]


def _solve_subset(
    gram: list[list[float]], target: list[float], subset: tuple[int, ...]
) -> list[float] | None:
    """Solve the equations of some columns by Cholesky; None if they depend on each other.

    Each column is scaled to length 1 first, because tokens squared are far from seconds.
    """
    scales = [gram[i][i] ** 0.5 for i in subset]
    if not all(scales):
        return None
    lower: list[list[float]] = []
    for row, (i, scale) in enumerate(zip(subset, scales, strict=True)):
        values: list[float] = []
        for column in range(row):
            scaled = gram[i][subset[column]] / (scale * scales[column])
            values.append((scaled - _dot(values, lower[column])) / lower[column][column])
        left = 1.0 - _dot(values, values)
        if left < _PIVOT:
            return None
        lower.append([*values, left**0.5])
    right = [target[i] / scale for i, scale in zip(subset, scales, strict=True)]
    solved = _substitute(lower, right)
    return [value / scale for value, scale in zip(solved, scales, strict=True)]


def _substitute(lower: list[list[float]], right: list[float]) -> list[float]:
    """Solve L L' x = r, first for L' x, then for x."""
    forward: list[float] = []
    for known, value in zip(lower, right, strict=True):
        forward.append((value - _dot(known, forward)) / known[-1])
    solution = [0.0] * len(lower)
    for row in reversed(range(len(lower))):
        behind = sum(lower[i][row] * solution[i] for i in range(row + 1, len(lower)))
        solution[row] = (forward[row] - behind) / lower[row][row]
    return solution


def _spread(solution: list[float], subset: tuple[int, ...]) -> _Row:
    values = [0.0] * 4
    for column, value in zip(subset, solution, strict=True):
        values[column] = value
    base, per_token, per_pair, per_context = values
    return base, per_token, per_pair, per_context


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    # The shorter one ends it: a row of the triangle is one longer than what is known before it.
    return sum(a * b for a, b in zip(left, right, strict=False))
