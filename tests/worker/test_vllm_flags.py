"""Flags of vLLM on a worker's command line."""

import logging
import re
from pathlib import Path

import pytest

from tidemill.protocol.errors import ConfigError
from tidemill.service.config import load_config
from tidemill_gpuworker.options.command_line import parse_config
from tidemill_gpuworker.options.vllm_flags import FLAGS, Noted, Refused, translate
from tidemill_gpuworker.options.worker_options import make_parser

DOCUMENT = Path(__file__).parents[2] / "docs" / "engine.md"
BASE = ("--model", "m", "--redis-url", "redis://h")


@pytest.mark.parametrize("spelling", [["--kv-offloading-size", "2"], ["--kv-offloading-size=2"]])
def test_a_renamed_flag_sets_ours(spelling: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = parse_config([*BASE, *spelling], load_config({}))
    assert config.swap_space == 2.0
    assert "--kv-offloading-size is --swap-space here" in caplog.text


def test_a_flag_without_effect_takes_its_value_along(caplog: pytest.LogCaptureFixture) -> None:
    flags = [
        "--seed",
        "7",
        "--disable-log-stats",
        "--load-format=safetensors",
        "--block-size",
        "32",
    ]
    with caplog.at_level(logging.WARNING):
        config = parse_config([*BASE, *flags], load_config({}))
    assert config.block_size == 32
    told = [record.message for record in caplog.records]
    assert [line.split()[0] for line in told] == ["--seed", "--disable-log-stats", "--load-format"]
    assert all("changes nothing: " in line for line in told)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--trust-remote-code"], "code that a model brings along"),
        (["--load-format", "pt"], "--load-format pt cannot be had. Choose auto or safetensors."),
        (["--data-parallel-size", "4"], "Start 4 workers"),
        (["--port=8000"], "is a matter of HTTP"),
        (["--seed"], "--seed lacks its value"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    ],
)
def test_what_cannot_be_had_is_told_in_one_line(flags: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config([*BASE, *flags], load_config({}))
    line = refused.value.one_line()
    assert reason in line and "\n" not in line


def test_no_flag_of_ours_is_translated() -> None:
    ours = {name for action in make_parser()._actions for name in action.option_strings}
    assert not ours & FLAGS.keys()
    assert translate(sorted(ours)).arguments == sorted(ours)


def test_every_flag_is_in_the_documented_table() -> None:
    section = DOCUMENT.read_text().partition("\n## Flags\n")[2].partition("\n## ")[0]
    documented = set(re.findall(r"`(--[a-z0-9-]+)", section))
    ours = {action.option_strings[-1] for action in make_parser()._actions if action.dest != "help"}
    ours = {name for name in ours if not name.startswith("--no-")} | {
        action.option_strings[0] for action in make_parser()._actions if action.dest != "help"
    }
    missing = {name for name in ours | FLAGS.keys() if name.startswith("--")} - documented
    assert not missing, f"docs/engine.md, Flags, lacks {sorted(missing)}"


def test_every_flag_says_what_becomes_of_it() -> None:
    for name, flag in FLAGS.items():
        if isinstance(flag, Noted):
            assert flag.note, name
        elif isinstance(flag, Refused):
            assert flag.reason and flag.fix.endswith("."), name
