"""The options of a worker's engine."""

import argparse
from pathlib import Path

from tidemill.protocol.prefix import DEFAULT_BLOCK_SIZE
from tidemill.protocol.sampling import DEFAULT_MAX_LOGPROBS, DEFAULT_MAX_N
from tidemill_gpuworker.lora.config import DEFAULT_MAX_LORAS, DEFAULT_MAX_RANK, parse_module
from tidemill_gpuworker.options.option_values import (
    count,
    gib,
    json_object,
    ms,
    num_logprobs,
    num_outputs,
    share,
    usage,
)
from tidemill_gpuworker.options.worker_config import BLOCK_SIZES, KV_CACHE_DTYPES
from tidemill_gpuworker.speculation.config import parse_speculative_config


def add_cache_size_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of how much the KV cache holds."""
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
        choices=BLOCK_SIZES,
        metavar="TOKENS",
        help="tokens per KV block, 16, 32, 64 or 128; the same for all workers of a model"
        " (%(default)s)",
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
        type=usage,
        default=0.9,
        metavar="SHARE",
        help="share of the GPU's memory that this worker may use: weights, the largest step and"
        " the KV cache, which gets the rest (%(default)s)",
    )


def add_cache_use_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of which blocks of the KV cache are kept."""
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


def add_lora_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of adapters."""
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


def add_batch_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of what goes into a step."""
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


def add_speed_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of how fast steps are."""
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


def add_sampling_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of what jobs may ask for of each token."""
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
    group.add_argument(
        "--generation-config",
        default="auto",
        metavar="auto|vllm|DIR",
        help="whose generation_config.json says what requests sample with that do not say it: the"
        " model's, nobody's, or that of a directory (%(default)s)",
    )
    group.add_argument(
        "--override-generation-config",
        type=json_object,
        default={},
        metavar="JSON",
        help='values in place of those in that file, for example {"temperature": 0.5} (none)',
    )
