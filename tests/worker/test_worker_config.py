"""The command line of a worker."""

import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.protocol.calls import RetryPause
from tidemill.protocol.errors import ConfigError
from tidemill.protocol.values import MAX_NAME_CHARS
from tidemill.service.config import ServiceConfig, load_config
from tidemill_gpuworker.__main__ import process_config
from tidemill_gpuworker.options.command_line import parse_config
from tidemill_gpuworker.options.worker_config import BLOCK_SIZES
from tidemill_kernels import triton_tuning

URL = "redis://127.0.0.1:1/0"


@pytest.fixture
def service() -> ServiceConfig:
    return load_config({"TIDEMILL_REDIS_URL": URL})


def test_a_model_alone_is_enough(service: ServiceConfig) -> None:
    config = parse_config(["--model", "/models/smol"], service)
    assert config.model_dir == Path("/models/smol")
    assert (config.served_model_name, config.redis_url) == ("smol", URL)
    assert config.enable_prefix_caching
    assert (config.block_size, config.watermark, config.gpu_memory_utilization) == (16, 0.01, 0.9)


def test_flags_have_the_names_of_vllm(service: ServiceConfig) -> None:
    flags = (
        "--model d --served-model-name n --dtype float32 --block-size 32 --max-num-seqs 3"
        " --max-num-batched-tokens 99 --max-model-len 50 --num-gpu-blocks-override 7"
        " --gpu-memory-utilization 0.5 --watermark 0 --no-enable-prefix-caching"
        " --long-prefill-token-threshold 8"
    )
    config = parse_config(flags.split(), service)
    assert (config.served_model_name, config.dtype, config.block_size) == ("n", "float32", 32)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (3, 99)
    assert (config.max_model_len, config.num_gpu_blocks_override) == (50, 7)
    assert (config.gpu_memory_utilization, config.watermark) == (0.5, 0.0)
    assert not config.enable_prefix_caching
    assert config.long_prefill_token_threshold == 8


def test_a_model_may_be_named_in_three_ways(service: ServiceConfig) -> None:
    for model, name in (
        ("/models/smol", "smol"),
        ("/models/smol-q4.gguf", "smol-q4"),
        ("org/smol@v2", "org/smol"),
    ):
        config = parse_config(["--model", model, "--model-impl", "transformers"], service)
        assert (config.model, config.served_model_name) == (model, name)
        assert config.model_impl == "transformers"
    assert parse_config(["--model", "d"], service).model_impl == "auto"


def test_memory_and_steps_have_the_flags_of_vllm(service: ServiceConfig) -> None:
    default = parse_config(["--model", "d"], service)
    assert (default.swap_space, default.preemption_mode) == (None, "recompute")
    assert (default.scheduling_mode, default.enforce_eager) == ("continuous", False)
    assert default.enable_chunked_prefill
    flags = (
        "--model d --swap-space 2.5 --preemption-mode swap --no-enable-chunked-prefill"
        " --enforce-eager --scheduling-mode static"
    )
    config = parse_config(flags.split(), service)
    assert (config.swap_space, config.preemption_mode) == (2.5, "swap")
    assert (config.scheduling_mode, config.enforce_eager) == ("static", True)
    assert not config.enable_chunked_prefill


def test_logprobs_are_bounded_and_raw_unless_asked_otherwise(service: ServiceConfig) -> None:
    default = parse_config(["--model", "d"], service)
    assert (default.max_logprobs, default.logprobs_mode) == (20, "raw_logprobs")
    flags = "--model d --max-logprobs -1 --logprobs-mode processed_logprobs"
    config = parse_config(flags.split(), service)
    assert (config.max_logprobs, config.logprobs_mode) == (-1, "processed_logprobs")
    with pytest.raises(ConfigError, match="neither a number of logprobs nor -1"):
        parse_config(["--model", "d", "--max-logprobs", "-2"], service)


def test_pauses_between_attempts_are_settings(service: ServiceConfig) -> None:
    default = process_config(parse_config(["--model", "d"], service))
    assert default.retry == RetryPause(base_ms=1_000, cap_ms=60_000)
    flags = "--model d --retry-seconds 0.25 --max-retry-seconds 8"
    config = process_config(parse_config(flags.split(), service))
    assert config.retry == RetryPause(base_ms=250, cap_ms=8_000)


def test_steps_are_neither_bounded_in_time_nor_logged_unless_asked_for(
    service: ServiceConfig,
) -> None:
    default = parse_config(["--model", "d"], service)
    assert (default.tpot_slo_ms, default.step_log) == (0.0, None)
    flags = "--model d --tpot-slo-ms 12.5 --step-log steps.jsonl"
    config = parse_config(flags.split(), service)
    assert (config.tpot_slo_ms, config.step_log) == (12.5, Path("steps.jsonl"))


@pytest.mark.parametrize(
    ("flags", "culprit"),
    [
        ([], "--model"),
        (["--model", "d", "--block-size", "0"], "--block-size"),
        (["--model", "d", "--block-size", "7"], "--block-size"),
        (["--model", "d", "--block-size", "48"], "choose from 16, 32, 64, 128"),
        (["--model", "d", "--max-model-len", "1"], "--max-model-len"),
        (["--model", "d", "--metrics-port", "70000"], "--metrics-port"),
        (["--model", "d", "--metrics-port", "-1"], "--metrics-port"),
        (["--model", "d", "--watermark", "1.5"], "--watermark"),
        (["--model", "d", "--max-step-seconds", "nan"], "--max-step-seconds"),
        (["--model", "d", "--tpot-slo-ms", "-1"], "--tpot-slo-ms"),
        (["--model", "d", "--dtype", "int8"], "--dtype"),
        (["--model", "d", "--swap-space", "-1"], "--swap-space"),
        (["--model", "d", "--preemption-mode", "stop"], "--preemption-mode"),
        (
            ["--model", "d", "--kv-cache-memory-bytes", "9", "--num-gpu-blocks-override", "9"],
            "not allowed with",
        ),
    ],
)
def test_a_wrong_value_names_its_flag(
    service: ServiceConfig, flags: list[str], culprit: str
) -> None:
    with pytest.raises(ConfigError, match=culprit) as caught:
        parse_config(flags, service)
    assert "--help" in caught.value.fix


@pytest.mark.parametrize(
    "flags",
    [
        ["--model", "d", "--served-model-name", "x" * 257],
        ["--model", "d", "--served-model-name", "a\x01b"],
        ["--model", "/"],
    ],
)
def test_a_name_that_no_job_could_ask_for_is_refused_unloaded(
    service: ServiceConfig, flags: list[str]
) -> None:
    with pytest.raises(ConfigError, match=r"--served-model-name .* is not 1 to 256 printable"):
        parse_config(flags, service)


def test_a_worker_without_a_broker_is_told_how_to_name_it() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(["--model", "d"], load_config({}))
    assert "TIDEMILL_REDIS_URL" in caught.value.fix


def test_what_decides_which_sequences_run_does_not_load_torch() -> None:
    # Tests and simulations start it in many processes.
    code = (
        "import sys, tidemill_gpuworker.engine.engine, tidemill_gpuworker.shell.worker_process\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_help_comes_without_loading_torch() -> None:
    code = (
        "import sys; from tidemill_gpuworker.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--max-num-seqs" in done.stdout and "SIGTERM" in done.stdout


def test_blocks_have_the_sizes_that_the_kernels_take() -> None:
    assert set(BLOCK_SIZES) == triton_tuning.BLOCK_SIZES


def test_the_borders_of_values_are_values(service: ServiceConfig) -> None:
    flags = ["--max-model-len", "2", "--metrics-port", "65535", "--block-size", "128"]
    name = "x" * MAX_NAME_CHARS
    config = parse_config(["--model", "d", "--served-model-name", name, *flags], service)
    assert config.served_model_name == name
    assert (config.max_model_len, config.metrics_port, config.block_size) == (2, 65535, 128)
