"""Best of n: the jobs of one prompt that differ in their seed alone; pure, for both clients."""

import secrets
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

from tidemill._checks import check_timeout, shown
from tidemill._request import (
    MAX_IDEMPOTENCY_KEY_CHARS,
    CandidateOptions,
    JobOptions,
    JobSpec,
    Prompt,
)
from tidemill.protocol.errors import InvalidRequest, JobError, TidemillError
from tidemill.protocol.sampling import MAX_SEED, SamplingParams
from tidemill.result import Result

MAX_CANDIDATES = 128

#: What a candidate's number adds to the idempotency key.
_KEY_ROOM = len(f"#{MAX_CANDIDATES}")

Rating = Callable[[Result], Any]


class Clock:
    """Shares one timeout between several waits; raises ``InvalidRequest`` for what is none."""

    def __init__(self, timeout: float | None) -> None:
        check_timeout(timeout)
        self._end = None if timeout is None else time.monotonic() + timeout

    @property
    def left(self) -> float | None:
        """Seconds that are left, None without a timeout."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())


def candidates(prompt: Prompt, n: int, options: CandidateOptions) -> list[JobSpec]:
    """Return the jobs to submit; the first has the given seed itself.  Raises ``InvalidRequest``.

    The same options, idempotency key included, always give the same jobs, and a smaller ``n`` the
    first of them.
    """
    _check_number(n)
    if n > 1:
        _check_sampling(options)
    key = _checked_key(options.get("idempotency_key"))
    base = _base_seed(options, key)
    specs = []
    for index in range(n):
        own: JobOptions = {"stream": False, **options, "n": 1, "seed": _seed(base, index)}
        if key is not None:
            own["idempotency_key"] = f"{key}#{index}"
        specs.append(JobSpec(prompt, **own))
    return specs


def first_error(outcomes: Sequence[object]) -> TidemillError | None:
    """Return the first error among outcomes, if any."""
    return next((one for one in outcomes if isinstance(one, TidemillError)), None)


def results_of(outcomes: Sequence[Result | JobError]) -> list[Result]:
    """Return all results; raises the first error instead if there is one."""
    error = first_error(outcomes)
    if error is not None:
        raise error
    return [one for one in outcomes if isinstance(one, Result)]


def best_of(outcomes: Sequence[Result | JobError], key: Rating) -> Result:
    """Return the result with the highest ``key``, the first of equals.

    Failed candidates do not take part; raises the first error if all have failed.
    """
    results = [one for one in outcomes if isinstance(one, Result)] or results_of(outcomes)
    return max(results, key=key)


def _check_number(n: object) -> None:
    is_number = isinstance(n, int) and not isinstance(n, bool)
    if not is_number or not 1 <= n <= MAX_CANDIDATES:  # type: ignore[operator]  # a number
        raise InvalidRequest(f"n: {shown(n)} is not between 1 and {MAX_CANDIDATES}", field="n")


def _check_sampling(options: CandidateOptions) -> None:
    params = options.get("params")
    given = params if isinstance(params, SamplingParams) else SamplingParams()
    temperature = options.get("temperature", given.temperature)
    # Whatever is no number is refused with the job itself.
    if isinstance(temperature, int | float) and temperature < 1e-5:
        raise InvalidRequest(
            "temperature: at 0 all candidates would be the same",
            field="temperature",
            fix="Raise it, or submit one job.",
        )
    if options.get("top_k", given.top_k) == 1:
        raise InvalidRequest(
            "top_k: with 1 all candidates would be the same",
            field="top_k",
            fix="Raise it, or submit one job.",
        )


def _checked_key(key: object) -> str | None:
    most = MAX_IDEMPOTENCY_KEY_CHARS - _KEY_ROOM
    if key is None or (isinstance(key, str) and 1 <= len(key) <= most):
        return key
    raise InvalidRequest(
        f"idempotency_key: for the best of n it must have 1 to {most} characters",
        field="idempotency_key",
    )


def _base_seed(options: CandidateOptions, key: str | None) -> object:
    params = options.get("params")
    given = params.seed if isinstance(params, SamplingParams) else None
    seed = options.get("seed", given)
    if seed is not None:
        return seed
    # A repetition under the same key must ask for the same tokens.
    return secrets.randbelow(MAX_SEED + 1) if key is None else _hashed(key)


def _seed(base: object, index: int) -> Any:
    return base if index == 0 else _hashed(f"{shown(base)}#{index}")


def _hashed(text: str) -> int:
    digest = sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8]) & MAX_SEED
