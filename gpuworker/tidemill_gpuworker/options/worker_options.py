"""The options of a worker's command line."""

import argparse
from pathlib import Path
from typing import NoReturn

from tidemill.protocol.errors import ConfigError
from tidemill_gpuworker.options import engine_options
from tidemill_gpuworker.options.option_values import (
    context_length,
    count,
    port,
    positive_seconds,
    seconds,
)
from tidemill_gpuworker.options.worker_config import QUANTIZATIONS

_DESCRIPTION = """\
Serve one model: take jobs from the broker, generate, and write the tokens back.

The model is a local Hugging Face directory with safetensors weights and tokenizer.json; or a GGUF
file, which is converted once; or a name on a hub, which is downloaded once. Start one worker per
GPU, or per group of CPU cores; they share the queue. SIGTERM drains the worker: running
jobs end or, after --drain-seconds, go back to the queue with the tokens they have.
"""
_EPILOG = """\
Settings shared by all processes come from the environment: TIDEMILL_REDIS_URL, TIDEMILL_SHARD,
TIDEMILL_LOG_LEVEL, TIDEMILL_LEASE_SECONDS, TIDEMILL_BEAT_SECONDS.

Options have vLLM's names and meanings. Of its flags that are not listed here many are accepted,
with a word in the log on what becomes of them: docs/engine.md, Flags.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, fix="See tidemill worker --help.")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the worker's command line; it raises ``ConfigError``."""
    parser = _Parser(
        prog="tidemill worker",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_argument_group("model")
    _add_model_options(model)
    _add_weight_options(model)
    _add_parallel_options(parser.add_argument_group("parallel"))
    _add_engine_options(parser)
    process = parser.add_argument_group("process")
    _add_process_options(process)
    _add_time_options(process)
    return parser


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    cache = parser.add_argument_group("KV cache")
    engine_options.add_cache_size_options(cache)
    engine_options.add_cache_use_options(cache)
    engine_options.add_lora_options(parser.add_argument_group("LoRA"))
    step = parser.add_argument_group("engine step")
    engine_options.add_batch_options(step)
    engine_options.add_speed_options(step)
    engine_options.add_sampling_options(parser.add_argument_group("sampling"))


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="directory of the model, its GGUF file, or its name on a hub:"
        " organisation/name[@revision]",
    )
    group.add_argument(
        "--served-model-name", metavar="NAME", help="name that jobs ask for (the model's own)"
    )
    group.add_argument(
        "--task",
        default="auto",
        choices=("auto", "generate", "embed", "score", "transcribe"),
        help="what the model is for; auto goes by its files (auto)",
    )
    group.add_argument(
        "--model-impl",
        default="auto",
        choices=("auto", "native", "transformers"),
        help="what computes the model: our own layers, those of transformers over our KV cache, or"
        " ours where there are any (auto)",
    )


def _add_weight_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:N, or auto: a GPU if there is one (auto)"
    )
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="of weights and KV cache (but see --kv-cache-dtype); float32 gives tokens that do not"
        " depend on the batch (auto)",
    )
    group.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="fp8, int8 or int4 keep a plain model's linear layers in 8 or 4 bits; others only say"
        " how the model is stored, which is found anyway (as stored)",
    )
    group.add_argument(
        "--max-model-len",
        type=context_length,
        metavar="TOKENS",
        help="longest prompt and output together (the model's own limit, or what the KV cache"
        " holds)",
    )


def _add_parallel_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=count,
        default=1,
        metavar="N",
        help="split each layer over N processes, on GPUs one each (%(default)s)",
    )
    group.add_argument(
        "--pipeline-parallel-size",
        "-pp",
        type=count,
        default=1,
        metavar="N",
        help="split the layers into N stages, each with its processes, for a model that does not"
        " fit otherwise; they compute one after another (%(default)s)",
    )


def _add_process_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--redis-url", metavar="URL", help="the broker (TIDEMILL_REDIS_URL)")
    group.add_argument(
        "--metrics-port",
        type=port,
        metavar="PORT",
        help="serve /metrics and /healthz on 127.0.0.1; 0 takes a free port (off)",
    )
    group.add_argument(
        "--vllm-metrics",
        action="store_true",
        help="tell /metrics under vLLM's names (vllm:num_requests_running, ...) too (off)",
    )
    group.add_argument(
        "--step-log",
        type=Path,
        metavar="FILE",
        help="append a line of JSON for each engine step: what it did and how long it took (off)",
    )
    group.add_argument(
        "--ready-fd",
        type=int,
        metavar="FD",
        help="file descriptor to write one line to, the worker's id, once it takes jobs",
    )


def _add_time_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-step-seconds",
        type=positive_seconds,
        default=60.0,
        metavar="S",
        help="a step that takes longer, or a prompt, counts as hung (%(default)s)",
    )
    group.add_argument(
        "--drain-seconds",
        type=seconds,
        default=30.0,
        metavar="S",
        help="time that running jobs get to end after SIGTERM or SIGINT (%(default)s)",
    )
    group.add_argument(
        "--retry-seconds",
        type=seconds,
        default=1.0,
        metavar="S",
        help="pause before a job that failed is tried again, doubled each time (%(default)s)",
    )
    group.add_argument(
        "--max-retry-seconds",
        type=seconds,
        default=60.0,
        metavar="S",
        help="bound on that pause (%(default)s)",
    )
