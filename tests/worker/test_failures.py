"""Which errors are worth another attempt."""

import pytest

from tidemill.protocol.errors import (
    BrokerUnavailable,
    DamagedModel,
    InvalidRequest,
    MalformedMessage,
    StreamGap,
    UnknownModel,
    UnsupportedVersion,
)
from tidemill_gpuworker.shell.failures import Failure, failure_of


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("too long", field="prompt"),
        UnknownModel("no such model", field="model"),
        MalformedMessage("not msgpack"),
        UnsupportedVersion("from the future"),
        StreamGap("the log breaks off", job_id="job_1"),
        DamagedModel("half a file"),
    ],
)
def test_what_is_wrong_with_the_job_itself_stays_wrong(error: Exception) -> None:
    assert failure_of(error, "it failed") == Failure(str(error), may_pass=False)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA: a prompt"), OSError(5, "x")])
def test_what_went_wrong_around_it_may_pass(error: Exception) -> None:
    failure = failure_of(error, "it failed")
    # Without the error's text, which may hold a part of the prompt.
    assert failure == Failure(f"it failed: {type(error).__name__}", may_pass=True)


def test_an_error_of_ours_that_may_pass_tells_its_fix() -> None:
    failure = failure_of(BrokerUnavailable("it is gone", fix="Wait."), "it failed")
    assert failure == Failure("it is gone. Wait.", may_pass=True)
