"""Options of ``tidemill up``, and those that it passes on."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result as Outcome

from tidemill.access.pepper import read_pepper
from tidemill.cli import up
from tidemill.cli.stack import StackOptions
from tidemill.protocol.errors import ConfigError
from tidemill.service.config import load_key_config

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


def test_a_gateway_that_asks_for_keys_finds_the_pepper_beside_its_data(
    tidemill: Tidemill, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[StackOptions] = []
    monkeypatch.setattr(up, "run_until_signal", asked.append)
    monkeypatch.setattr(up, "find_model", lambda model, cache: (model, "name"))
    directory = tmp_path / "elsewhere"
    outcome = tidemill("up", "--model", "m", "--require-keys", "--data-dir", str(directory))
    assert outcome.exception is None, outcome.exception
    gateway = asked[0].gateway
    assert gateway is not None and "--require-keys" in gateway.args
    assert (directory / "key_pepper").is_file()
    # What the stack tells its processes, and what the command line is to be told.
    monkeypatch.setenv("TIDEMILL_DATA_DIR", str(directory))
    assert read_pepper(load_key_config())


@pytest.mark.parametrize("nothing", ["", " ,"])
def test_an_option_for_keys_without_any_lets_nobody_in(
    tidemill: Tidemill, monkeypatch: pytest.MonkeyPatch, nothing: str
) -> None:
    monkeypatch.setattr(up, "run_until_signal", lambda options: pytest.fail("it was started"))
    monkeypatch.setattr(up, "find_model", lambda model, cache: (model, "name"))
    outcome = tidemill("up", "--model", "m", "--api-key", nothing)
    assert isinstance(outcome.exception, ConfigError)
    assert "--api-key holds no key" in outcome.exception.one_line()


def test_private_webhooks_are_allowed_to_who_takes_them_and_to_who_delivers_them(
    tidemill: Tidemill, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[StackOptions] = []
    monkeypatch.setattr(up, "run_until_signal", asked.append)
    monkeypatch.setattr(up, "find_model", lambda model, cache: (model, "name"))
    for flags in ((), ("--allow-private-webhooks",)):
        outcome = tidemill("up", "--model", "m", "--data-dir", str(tmp_path), *flags)
        assert outcome.exception is None, outcome.exception
        gateway = asked[-1].gateway
        assert gateway is not None and gateway.args == flags
        assert tuple(asked[-1].scheduler_args) == flags


def test_workers_share_the_cores_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 3, 5, 7})
    assert dict(up.thread_environment(2, None))["OMP_NUM_THREADS"] == "2"
    assert dict(up.thread_environment(5, None))["OMP_NUM_THREADS"] == "1"
    assert dict(up.thread_environment(2, 3))["OMP_NUM_THREADS"] == "3"
