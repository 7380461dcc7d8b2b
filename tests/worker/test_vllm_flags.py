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
#: Every flag that a command line of vLLM 0.8.5 or 0.32 may have, from their parsers.
FLAGS_OF_VLLM = Path(__file__).parents[1] / "data" / "vllm_flags.txt"
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
    ("flags", "name", "value"),
    [
        (["--max_model_len", "128"], "max_model_len", 128),
        (["--max_model_len=8k"], "max_model_len", 8000),
        (["--max-model-len", "8K"], "max_model_len", 8192),
        (["--max-model-len", "auto"], "max_model_len", None),
        (["--max-model-len", "-1"], "max_model_len", None),
        (["--max-num-batched-tokens", "1.5k"], "max_num_batched_tokens", 1500),
        (["--kv-cache-memory-bytes", "2G"], "kv_cache_memory_bytes", 2 << 30),
        (["--dtype", "half"], "dtype", "float16"),
        (["--dtype=float"], "dtype", "float32"),
        (["-q", "gptq_marlin"], "quantization", "gptq"),
        (["--quantization", "awq_marlin"], "quantization", "awq"),
        (["--gpu-memory-utilization", "1.0"], "gpu_memory_utilization", 1.0),
        (["--enable-prefix-caching=False"], "enable_prefix_caching", False),
        (["--enable_chunked_prefill=true"], "enable_chunked_prefill", True),
        (["--step_log", "a_b=c"], "step_log", Path("a_b=c")),
    ],
)
def test_a_spelling_of_vllm_means_the_same(flags: list[str], name: str, value: object) -> None:
    assert getattr(parse_config([*BASE, *flags], load_config({})), name) == value


@pytest.mark.parametrize(
    "flags",
    [
        ["--num-scheduler-steps", "8"],
        ["--num_lookahead_slots=3"],
        ["-O3"],
        ["-O", "2"],
        ["-cc.mode=3"],
        ["--compilation-config", "{}"],
        ["--compilation-config.mode", "3"],
        ["--cudagraph-capture-sizes", "1", "2", "4"],
        ["--attention-backend", "FLASH_ATTN"],
        ["--guided-decoding-disable-fallback"],
        ["--disable-hybrid-kv-cache-manager"],
    ],
)
def test_a_flag_that_is_no_longer_needed_changes_nothing(
    flags: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config = parse_config([*BASE, *flags, "--max-num-seqs", "7"], load_config({}))
    assert config.max_num_seqs == 7
    [told] = [record.message for record in caplog.records]
    assert "changes nothing: " in told


def test_a_command_line_of_vllm_is_known_to_the_last_flag() -> None:
    ours = {name for action in make_parser()._actions for name in action.option_strings}
    names = FLAGS_OF_VLLM.read_text().split()
    assert len(names) > 250
    assert [name for name in names if name not in ours | FLAGS.keys()] == []


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--trust-remote-code"], "code that a model brings along"),
        (["--load-format", "pt"], "--load-format pt cannot be had. Choose auto or safetensors."),
        (["--data-parallel-size", "4"], "Start 4 workers"),
        (["--port=8000"], "is a matter of HTTP"),
        (["--seed"], "--seed lacks its value"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--speculative-model", "[ngram]"], "is part of --speculative-config here"),
        (["--num_speculative_tokens=5"], "is part of --speculative-config here"),
        (["--speculative-draft-tensor-parallel-size", "1"], "wants a draft model"),
        (["--worker-use-ray"], "one machine"),
        (["--rope-scaling", "{}"], "changes the model"),
        (["--limit-mm-per-prompt.image", "2"], "images, sound and video"),
        (["-dp", "2"], "Start more workers"),
        (["--cpu-offload-gb", "4"], "--cpu-offload-gb 4 cannot be had. Choose 0."),
        (["--enable-prefix-caching=maybe"], "Write --enable-prefix-caching or --no-enable-"),
        (["--max-step-seconds", "0"], "--max-step-seconds: 0 seconds are no time at all"),
        (["--swap-space", "1e300"], "--swap-space: 1e300 is not a number of GiB, up to 1,073,741"),
        (["--gpu-memory-utilization", "0"], "--gpu-memory-utilization: 0 is not a share above 0"),
        (["--max-model-len", "1.5K"], "1.5K is no whole number"),
        (["--max-model-len", "0k"], "--max-model-len: 0k is not 1 or more"),
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
