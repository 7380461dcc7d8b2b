"""Options of ``tidemill up``, and those that it passes on."""

from collections.abc import Callable

import pytest
from click.testing import Result as Outcome

from tidemill.cli import up
from tidemill.cli.stack import StackOptions
from tidemill.protocol.errors import ConfigError

Tidemill = Callable[..., Outcome]


@pytest.mark.parametrize("words", [["--enable-lora"], ["--max-num-seqs=4"], ["--port", "1", "--x"]])
def test_an_option_of_the_worker_is_told_to_come_behind_two_dashes(
    tidemill: Tidemill, words: list[str]
) -> None:
    outcome = tidemill("up", *words)
    assert isinstance(outcome.exception, ConfigError)
    told = outcome.exception.one_line()
    assert f"up has no option {words[-1].partition('=')[0]}" in told
    assert f"up -- {words[-1]}" in told


def test_what_comes_behind_two_dashes_is_the_workers(
    tidemill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[StackOptions] = []
    monkeypatch.setattr(up, "run_until_signal", asked.append)
    monkeypatch.setattr(up, "find_model", lambda model, cache: (model, "name"))
    outcome = tidemill("up", "--model", "m", "--no-gateway", "--", "--enable-lora", "--port=1")
    assert outcome.exception is None, outcome.exception
    assert asked[0].worker_args[-2:] == ("--enable-lora", "--port=1")
