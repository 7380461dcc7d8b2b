"""Every two features of the engine together give each answer that it gives alone without them.

Alone: one sequence after the other, without prefix cache, chunks, preemption or guesses, in blocks
of 16.  What that gives is held against transformers, on a model with the adapter merged into it,
and with keys and values rounded to 8 bits if the cache is of int8.
"""

import json
import random
import re
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import combinations, product

import pytest
import torch

from support.feature_cases import FACTORS, PAIRWISE, ROWS, FeatureJob, any_jobs, jobs_of
from support.feature_rig import FeatureEngine, Models, Told, plain_engine
from support.greedy import reference_logits
from support.pairwise import Row, pairs_of
from support.quantised_attention import rounded_kv
from tidemill.protocol.logprobs import TokenLogprobs
from tidemill.protocol.states import FinishReason

ATOL = 1e-4
#: An element next to the middle of two codes may fall on the other one.
QUANTISED_ATOL = 5e-3
#: What cannot be asked for together, or does nothing.
NO_PAIRS = {
    (("answers", "beams"), ("sampling", "seeded")),
    (("answers", "beams"), ("logprobs", 2)),
    (("answers", "beams"), ("structure", "regex")),
    (("answers", "beams"), ("structure", "json")),
    (("answers", "three"), ("sampling", "greedy")),
    (("prefix_cache", False), ("memory", "swap")),
    (("adapters", "mixed"), ("batch", "one")),
}
SWEPT = random.Random(11).sample(ROWS, 150)


class Expected:
    """What each job is to be told, found once."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._known: dict[tuple[object, ...], list[Told]] = {}

    def of(self, job: FeatureJob, kv_dtype: str) -> list[Told]:
        """Return the answers of a job on an engine that has nothing else to do."""
        key = (*job.key, kv_dtype)
        if key not in self._known:
            answers = _alone(plain_engine(self._models, kv_dtype), job)
            for told in answers:
                _check_form(job, told)
                self._check_reference(job, told, kv_dtype)
            self._known[key] = answers
        return self._known[key]

    def _check_reference(self, job: FeatureJob, told: Told, kv_dtype: str) -> None:
        model = self._models.references[job.adapter]
        is_exact = kv_dtype == "auto"
        with nullcontext() if is_exact else rounded_kv(model, kv_dtype):
            logits = reference_logits(model, list(job.prompt), told.ids)
        if job.params.temperature == 0.0 and job.structure is None:
            assert told.ids == _allowed(job, logits).argmax(dim=-1).tolist()
        if job.params.logprobs is not None and is_exact:
            _check_logprobs(told, logits.double().log_softmax(dim=-1))


def _allowed(job: FeatureJob, logits: torch.Tensor) -> torch.Tensor:
    if job.params.allowed_token_ids is None:
        return logits
    places = torch.tensor(job.params.allowed_token_ids)
    return torch.full_like(logits, -torch.inf).index_copy(1, places, logits[:, places])


def _alone(engine: FeatureEngine, job: FeatureJob) -> list[Told]:
    if job.params.use_beam_search:
        return list(engine.run({"alone": job}).values())
    return [engine.run_alone(job, choice) for choice in range(job.params.num_outputs)]


def _check_form(job: FeatureJob, told: Told) -> None:
    if told.end != (FinishReason.STOP, None):
        return
    if job.structure == "regex":
        assert re.fullmatch("(axb |ayb ){2}[0-9]", told.text)
    if job.structure == "json":
        values = json.loads(told.text)
        assert 2 <= len(values) <= 3
        assert set(values) <= {1, 22}


def _check_logprobs(told: Told, rows: torch.Tensor) -> None:
    # rows [tokens, vocabulary]: what each of the tokens was drawn from
    for token, logprobs, row in zip(told.ids, told.logprobs, rows, strict=True):
        assert logprobs.logprob == pytest.approx(row[token].item(), abs=ATOL)
        likeliest = row.topk(len(logprobs.top)).values.tolist()
        assert [value for _, value in logprobs.top] == pytest.approx(likeliest, abs=ATOL)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Models(tmp_path_factory.mktemp("features"))
    yield made
    made.compiler.close()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def expected(models: Models) -> Expected:
    return Expected(models)


def describe(row: Row) -> str:
    return "-".join(
        name if value is True else f"{name}={value}"
        for name, value in row.items()
        if value not in (False, None, 0)
    )


def assert_equal(found: Told, wanted: Told, kv_dtype: str) -> None:
    assert found.ids == wanted.ids
    assert (found.text, found.end) == (wanted.text, wanted.end)
    assert len(found.logprobs) == len(wanted.logprobs)
    is_exact = kv_dtype == "auto"
    atol = ATOL if is_exact else QUANTISED_ATOL
    for ours, theirs in zip(found.logprobs, wanted.logprobs, strict=True):
        assert _values(ours) == pytest.approx(_values(theirs), abs=atol)
        if is_exact:
            assert _likeliest(ours) == _likeliest(theirs)
            # Far down, where tokens are close to each other, rounding may swap two of them.
            assert abs(ours.rank - theirs.rank) <= 1


def _likeliest(told: TokenLogprobs) -> list[int]:
    return [token for token, _ in told.top]


def _values(told: TokenLogprobs) -> list[float]:
    return [told.logprob, *(value for _, value in told.top)]


def check_row(models: Models, expected: Expected, row: Row) -> FeatureEngine:
    """Run the row's jobs, and return the engine that has done so."""
    jobs = jobs_of(row)
    engine = check_jobs(models, expected, row, jobs)
    # Once more, as somebody who finds a cache.
    check_jobs(models, expected, row, jobs[:1], engine)
    check_use(engine, row)
    return engine


def check_jobs(
    models: Models,
    expected: Expected,
    row: Row,
    jobs: list[FeatureJob],
    engine: FeatureEngine | None = None,
) -> FeatureEngine:
    names = [f"job{number}" for number in range(len(jobs))]
    # Before the engine has anything in the cache, which the models of one kind share.
    answers = [expected.of(job, row["kv_dtype"]) for job in jobs]
    wanted = dict(zip(names, answers, strict=True))
    engine = engine or FeatureEngine(models, row)
    told = engine.run(dict(zip(names, jobs, strict=True)))
    assert len(told) == sum(map(len, answers))
    for (name, choice), found in told.items():
        assert_equal(found, wanted[name][choice], row["kv_dtype"])
    return engine


def check_use(engine: FeatureEngine, row: Row) -> None:
    """Assert that the features were not merely switched on."""
    figures, blocks = engine.inner.figures, engine.blocks
    is_roomy = row["memory"] == "roomy"
    assert (engine.runner.num_chunked > 0) == row["chunks"]
    assert (figures.num_preemptions > 0) != is_roomy
    if is_roomy:
        assert (figures.num_cached_tokens > 0) == row["prefix_cache"]
        assert (blocks.num_forked > 0) == (row["answers"] != "one")
    if row["memory"] == "swap":
        assert blocks.num_swapped_out > 0
    if row["num_drafted"] and row["answers"] != "beams":
        assert figures.speculation.num_accepted_tokens > 0


def test_any_two_features_meet_in_some_case() -> None:
    met = set().union(*map(pairs_of, PAIRWISE))

    values = [[(name, value) for value in values] for name, values in FACTORS.items()]
    every = {pair for both in combinations(values, 2) for pair in product(*both)}
    assert every - met == NO_PAIRS


@pytest.mark.parametrize("row", PAIRWISE, ids=describe)
def test_features_together_change_no_answer(models: Models, expected: Expected, row: Row) -> None:
    engine = check_row(models, expected, row)

    if (row["memory"], row["block_size"], row["batch"]) == ("swap", 16, "mixed"):
        assert engine.blocks.num_swapped_in > 0


@pytest.mark.slow
@pytest.mark.parametrize("row", SWEPT, ids=describe)
def test_features_change_no_answer_in_any_combination(
    models: Models, expected: Expected, row: Row
) -> None:
    check_row(models, expected, row)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_jobs_of_any_kinds_and_priorities_share_an_engine(
    models: Models, expected: Expected, seed: int
) -> None:
    draw = random.Random(seed)
    row = draw.choice(ROWS) | {"kv_dtype": "auto"}

    check_jobs(models, expected, row, any_jobs(draw))
