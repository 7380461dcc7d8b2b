"""``tidemill cancel``."""

from collections.abc import Callable

import pytest
from click.testing import Result as Outcome

from support.fake_mill import FakeMill
from tidemill import ConfigError, Producer

Tidemill = Callable[..., Outcome]


def test_a_job_is_cancelled_by_its_id(
    tidemill: Tidemill, producer: Producer, mill: FakeMill
) -> None:
    job = producer.submit([1])
    assert tidemill("cancel", job.id).stdout == "cancelled\n"
    assert job.status().state == "cancelled"


def test_a_batch_is_cancelled_after_a_question(
    tidemill: Tidemill, producer: Producer, mill: FakeMill
) -> None:
    jobs = [producer.submit([1], batch="b") for _ in range(3)]
    refused = tidemill("cancel", "--batch", "b", answer="n\n")
    assert refused.exit_code == 1
    assert "Cancel the 3 unfinished jobs of batch b?" in refused.stderr
    assert jobs[0].status().state == "queued"
    agreed = tidemill("cancel", "--batch", "b", answer="y\n")
    assert agreed.exit_code == 0
    assert agreed.stdout.endswith("3 cancelled\n")
    assert {job.status().state.value for job in jobs} == {"cancelled"}


def test_everything_of_a_tenant_is_cancelled_without_a_question_if_told_so(
    tidemill: Tidemill, producer: Producer, mill: FakeMill, redis_url: str
) -> None:
    producer.submit([1], delay=60)
    producer.submit([1])
    with Producer(redis_url, tenant="other") as other:
        job = other.submit([1])
        assert tidemill("cancel", "--all", "--yes").stdout == "2 cancelled\n"
        assert job.status().state == "queued"
        assert tidemill("cancel", "--all", "-y", "--tenant", "other").stdout == "1 cancelled\n"


def test_an_unknown_batch_is_told_and_not_closed(
    tidemill: Tidemill, producer: Producer, mill: FakeMill
) -> None:
    outcome = tidemill("cancel", "--batch", "b", "--yes")
    assert isinstance(outcome.exception, ConfigError)
    assert "no batch 'b'" in str(outcome.exception)
    producer.submit([1], batch="b")


@pytest.mark.parametrize("args", [[], ["job_x", "--all"], ["--all", "--batch", "b"]])
def test_what_to_cancel_must_be_clear(tidemill: Tidemill, args: list[str]) -> None:
    outcome = tidemill("cancel", *args)
    assert isinstance(outcome.exception, ConfigError)
    assert "one of" in str(outcome.exception)
