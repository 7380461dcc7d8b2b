"""The options of a worker's command line."""

import argparse
from pathlib import Path
from typing import NoReturn

from tidemill.protocol.errors import ConfigError
from tidemill.protocol.prefix import DEFAULT_BLOCK_SIZE
from tidemill.protocol.sampling import DEFAULT_MAX_LOGPROBS, DEFAULT_MAX_N
from tidemill_gpuworker.lora.config import DEFAULT_MAX_LORAS, DEFAULT_MAX_RANK, parse_module
from tidemill_gpuworker.options.option_values import (
    count,
    gib,
    ms,
    num_logprobs,
    num_outputs,
    seconds,
    share,
)
from tidemill_gpuworker.options.worker_config import KV_CACHE_DTYPES, QUANTIZATIONS
from tidemill_gpuworker.speculation.config import parse_speculative_config

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
    _add_model_options(parser.add_argument_group("model"))
    _add_parallel_options(parser.add_argument_group("parallel"))
    _add_cache_options(parser.add_argument_group("KV cache"))
    _add_lora_options(parser.add_argument_group("LoRA"))
    _add_step_options(parser.add_argument_group("engine step"))
    _add_sampling_options(parser.add_argument_group("sampling"))
    _add_process_options(parser.add_argument_group("process"))
    return parser


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
        type=count,
        metavar="TOKENS",
        help="longest prompt and output together (the model's own limit)",
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


def _add_sampling_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-logprobs",
        type=num_logprobs,
        default=DEFAULT_MAX_LOGPROBS,
        metavar="N",
        help="most logprobs that jobs may ask for of each position; -1 for no limit (%(default)s)",
    )
    group.add_argument(
        "--max-n",
        type=num_outputs,
        default=DEFAULT_MAX_N,
        metavar="N",
        help="most outputs that a job may ask for, beams among them (%(default)s)",
    )
    group.add_argument(
        "--logprobs-mode",
        choices=("raw_logprobs", "processed_logprobs"),
        default="raw_logprobs",
        help="of the model's logits, or after penalties, temperature and filters (%(default)s)",
    )


def _add_cache_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=("auto", *KV_CACHE_DTYPES),
        help="fp8 (which is fp8_e4m3) or int8 hold twice the tokens of bfloat16, with a scale for"
        " each head of each token; auto: as --dtype (auto)",
    )
    group.add_argument(
        "--block-size",
        type=count,
        default=DEFAULT_BLOCK_SIZE,
        metavar="TOKENS",
        help="tokens per KV block; the same for all workers of a model (%(default)s)",
    )
    size = group.add_mutually_exclusive_group()
    size.add_argument(
        "--kv-cache-memory-bytes",
        type=count,
        metavar="BYTES",
        help="size of the KV cache (on a CPU: a quarter of the free memory, 4 GiB at most)",
    )
    size.add_argument(
        "--num-gpu-blocks-override", type=count, metavar="N", help="size of the KV cache in blocks"
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=share,
        default=0.9,
        metavar="SHARE",
        help="share of the GPU's memory that this worker may use: weights, the largest step and"
        " the KV cache, which gets the rest (%(default)s)",
    )
    group.add_argument(
        "--watermark",
        type=share,
        default=0.01,
        metavar="SHARE",
        help="share of the blocks kept free for running jobs when one is admitted (%(default)s)",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the KV blocks of finished jobs and reuse equal prefixes (on)",
    )
    group.add_argument(
        "--swap-space",
        type=gib,
        metavar="GIB",
        help="host memory for KV blocks that left the device; found there, they are not computed"
        " again (4; on a CPU 0)",
    )
    group.add_argument(
        "--preemption-mode",
        choices=("recompute", "swap"),
        default="recompute",
        help="where the blocks of a job that makes room go: overwritten at need, or to"
        " the swap space at once (%(default)s)",
    )


def _add_lora_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--enable-lora", action="store_true", help="let jobs name adapters of the model (off)"
    )
    group.add_argument(
        "--lora-modules",
        type=parse_module,
        nargs="+",
        default=(),
        metavar="NAME=DIR",
        help="adapters, as directories that PEFT wrote",
    )
    group.add_argument(
        "--lora-dir",
        type=Path,
        metavar="DIR",
        help="directory whose directories are adapters; they may come and go while the worker runs",
    )
    group.add_argument(
        "--max-loras",
        type=count,
        default=DEFAULT_MAX_LORAS,
        metavar="N",
        help="adapters that stay loaded, the last ones used (%(default)s)",
    )
    group.add_argument(
        "--max-lora-rank",
        type=count,
        default=DEFAULT_MAX_RANK,
        metavar="N",
        help="refuse adapters of a higher rank (%(default)s)",
    )


def _add_step_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-num-seqs",
        type=count,
        default=64,
        metavar="N",
        help="jobs that run at the same time (%(default)s)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=count,
        metavar="TOKENS",
        help="tokens of one step: more is faster, fewer keeps running streams smooth (2048; on a"
        " CPU 512)",
    )
    group.add_argument(
        "--long-prefill-token-threshold",
        type=int,
        default=0,
        metavar="TOKENS",
        help="cut longer prompts into chunks of so many tokens; 0: only by the step's room (0)",
    )
    group.add_argument(
        "--enable-chunked-prefill",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let a prompt take several steps; without, --max-num-batched-tokens must hold the"
        " longest one (on)",
    )
    group.add_argument(
        "--scheduling-mode",
        choices=("continuous", "static"),
        default="continuous",
        help="static runs one batch after another, as a baseline for measurements (%(default)s)",
    )
    group.add_argument(
        "--enforce-eager",
        action="store_true",
        help="accepted for scripts written for vLLM: steps are never captured as CUDA graphs",
    )
    group.add_argument(
        "--speculative-config",
        type=parse_speculative_config,
        metavar="JSON",
        help="guess tokens from earlier text and compute them together, for example"
        ' {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5,'
        ' "prompt_lookup_min": 2}; outputs stay the same (off)',
    )
    group.add_argument(
        "--tpot-slo-ms",
        type=ms,
        default=0.0,
        metavar="MS",
        help="cut prefills so that a step takes no longer, as far as the worker can predict, while"
        " an interactive or standard job gets its tokens; 0: no limit (0)",
    )
    group.add_argument("--num-threads", type=count, metavar="N", help="CPU threads (one per core)")


def _add_process_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--redis-url", metavar="URL", help="the broker (TIDEMILL_REDIS_URL)")
    group.add_argument(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="serve /metrics and /healthz on 127.0.0.1; 0 takes a free port (off)",
    )
    group.add_argument(
        "--max-step-seconds",
        type=seconds,
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
