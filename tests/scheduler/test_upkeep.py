"""Duties that the broker refuses something."""

import pytest
from redis import exceptions

from tidemill.protocol.errors import BrokerUnavailable, QueueFull, StaleEpoch
from tidemill_scheduler.upkeep import upkeep
from tidemill_scheduler.upkeep.upkeep import keep_up


class Duty:
    """Fails with one error after another, then is done."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    async def __call__(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_AGAIN_SECONDS", 0)


async def test_a_duty_begins_again_after_what_the_broker_refused() -> None:
    duty = Duty(
        exceptions.OutOfMemoryError("full"),
        exceptions.NoPermissionError("forbidden"),
        QueueFull("the server's memory is full", retry_after_seconds=5.0),
    )

    await keep_up(duty)

    assert not duty.errors


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (exceptions.ConnectionError("gone"), BrokerUnavailable),
        (StaleEpoch("over"), StaleEpoch),
        (KeyError("a mistake"), KeyError),
    ],
)
async def test_whatever_ends_a_term_is_told(error: Exception, told: type[Exception]) -> None:
    with pytest.raises(told):
        await keep_up(Duty(error))
