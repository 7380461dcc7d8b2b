"""Options that jobs of one call share are checked once, and say what they would for each alone."""

from typing import Any

import pytest

from support.fake_mill import FakeMill
from support.twins import Twin
from tidemill import InvalidRequest, JobSpec, SamplingParams
from tidemill import _async_submitter as async_submitter
from tidemill import _job_options as job_options
from tidemill._job_options import CheckedOptions, SharedOptions
from tidemill.protocol.calls import NewJob


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options that were checked."""
    check, seen = job_options._checked, []

    def counted(options: Any) -> CheckedOptions:
        seen.append(options)
        return check(options)

    monkeypatch.setattr(job_options, "_checked", counted)
    return seen


def test_options_of_all_jobs_are_checked_once(
    producer: Twin, mill: FakeMill, checks: list[Any]
) -> None:
    items = [JobSpec([n], idempotency_key=f"k{n}") for n in range(1, 41)]
    jobs = producer.submit_many(items, max_tokens=5, stop=["x", "y"], batch="b")
    assert len(checks) == 1
    claims = [mill.claim() for _ in jobs]
    assert [claim.request.prompt_ids for claim in claims] == [(n,) for n in range(1, 41)]
    assert {claim.request.params for claim in claims} == {
        SamplingParams(max_tokens=5, stop=("x", "y"))
    }
    # With the key goes what it had before.
    again = producer.submit([7], idempotency_key="k7", max_tokens=5, stop=["x", "y"], batch="b")
    assert again.id == jobs[6].id and not again.is_new


def test_options_that_differ_are_checked_each() -> None:
    shared, stops = SharedOptions(), ["x"]
    given: list[dict[str, Any]] = [
        {"stop": stops},
        {"stop": stops, "seed": 1},
        {"stop": ["y"], "seed": 1},
        {"seed": 1},
        {"seed": 1, "idempotency_key": "k"},
    ]
    for options in given:
        drafts = [JobSpec("a", **options).draft("default", each) for each in (shared, None)]
        assert drafts[0] == drafts[1]


def test_each_of_several_jobs_is_told_what_is_wrong_with_their_options() -> None:
    shared = SharedOptions()
    for options in ({"n": 0}, {"n": 0}, {"seed": 3}, {"n": 0}):
        if "seed" in options:
            assert JobSpec("a", **options).draft("default", shared).request.params.seed == 3
            continue
        with pytest.raises(InvalidRequest) as refused:
            JobSpec("a", **options).draft("default", shared)
        assert refused.value.field == "n"


def test_many_jobs_are_packed_a_few_at_a_time() -> None:
    jobs = [NewJob(str(n), JobSpec("a").draft("default").request) for n in range(150)]
    pages = list(async_submitter._pages(jobs))
    assert [len(page) for page in pages] == [64, 64, 22]
    assert [job for page in pages for job in page] == jobs
