"""Few combinations in which every two values of different factors meet."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(row: Row) -> set[Pair]:
    """Return the pairs of values that meet in a row."""
    return set(combinations(row.items(), 2))


def allowed_rows(
    factors: Mapping[str, Sequence[Any]], is_allowed: Callable[[Row], bool]
) -> list[Row]:
    """Return all combinations that make sense."""
    rows = (dict(zip(factors, values, strict=True)) for values in product(*factors.values()))
    return [row for row in rows if is_allowed(row)]


def covering_rows(rows: Sequence[Row], seed: int) -> list[Row]:
    """Return some of the rows, in which all pairs meet that meet in any of them.

    Greedy: the next row is the one with most pairs that are new (Cohen et al., 1997), by chance
    among equals.
    """
    numbers: dict[Pair, int] = {}
    codes = np.array(
        [[numbers.setdefault(p, len(numbers)) for p in combinations(r.items(), 2)] for r in rows]
    )
    draw = np.random.default_rng(seed)
    is_missing = np.ones(len(numbers), bool)
    chosen: list[Row] = []
    while is_missing.any():
        gains = is_missing[codes].sum(axis=1) + draw.random(len(rows)) * 0.5
        best = int(gains.argmax())
        is_missing[codes[best]] = False
        chosen.append(rows[best])
    return chosen
