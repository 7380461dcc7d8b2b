"""One measurement in a process of its own: a system, a workload, one JSON line on stdout.

A process a measurement keeps peak memory apart and gives every run the same cold start.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Before torch loads its OpenMP runtime: idle threads that spin starve each other on shared cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from workloads import Request, make_workload

from tidemill.protocol.sampling import SamplingParams
from tidemill.service.config import load_config
from tidemill_gpuworker.engine.engine import Engine
from tidemill_gpuworker.engine.model_runner import peak_resident_bytes
from tidemill_gpuworker.engine.sequence import Sequence
from tidemill_gpuworker.loading.model_setup import load_model
from tidemill_gpuworker.options.worker_config import WorkerConfig


@dataclass(frozen=True)
class Measurement:
    """Figures of one run; times in seconds, None where the system cannot tell."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    ttft_p50: float | None = None
    ttft_p99: float | None = None
    tpot_p50: float | None = None
    num_cached_tokens: int | None = None


@dataclass
class _Timeline:
    """When a request got its first and its latest token."""

    first: float
    last: float
    num_tokens: int = 1


def measure_engine(options: argparse.Namespace) -> Measurement:
    """Run a workload through the engine as a worker would set it up."""
    served = load_model(_worker_config(options))
    vocab_size = served.card.vocab_size
    _run(served.engine, make_workload("W4", vocab_size, options.seed + 1)[:1], "warm-up")
    requests = make_workload(options.workload, vocab_size, options.seed)
    cached_before = served.engine.figures.num_cached_tokens
    started, cpu_started = time.perf_counter(), time.process_time()
    timelines = _run(served.engine, requests, "run")
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    waits = sorted(line.first - started for line in timelines.values())
    gaps = [(line.last - line.first) / max(line.num_tokens - 1, 1) for line in timelines.values()]
    return _measurement(
        requests,
        seconds,
        cpu_seconds,
        ttft_p50=statistics.median(waits),
        ttft_p99=waits[int(0.99 * (len(waits) - 1) + 0.5)],
        tpot_p50=statistics.median(gaps),
        num_cached_tokens=served.engine.figures.num_cached_tokens - cached_before,
    )


def measure_transformers(options: argparse.Namespace) -> Measurement:
    """Run a workload of equal lengths as one batch of ``generate``."""
    import transformers  # seconds to import, and not what the engine is measured with

    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype)
    ).eval()
    # In the call alone, None would be filled in from here.
    model.generation_config.eos_token_id = None
    requests = make_workload(options.workload, model.config.vocab_size, options.seed)
    batch = torch.tensor([request.prompt for request in requests])

    def generate(num_tokens: int) -> torch.Tensor:
        with torch.inference_mode():
            return model.generate(  # type: ignore[no-any-return]
                input_ids=batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )

    generate(2)
    started, cpu_started = time.perf_counter(), time.process_time()
    tokens = generate(requests[0].num_output)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    assert tokens.shape[1] == batch.shape[1] + requests[0].num_output
    return _measurement(requests, seconds, cpu_seconds)


SYSTEMS: dict[str, Callable[[argparse.Namespace], Measurement]] = {
    "tidemill": measure_engine,
    "transformers": measure_transformers,
}


def _worker_config(options: argparse.Namespace) -> WorkerConfig:
    return WorkerConfig(
        model_dir=options.model,
        served_model_name="benchmark",
        redis_url="",
        service=load_config(),
        device=options.device,
        dtype=options.dtype,
        num_threads=options.threads,
        max_num_batched_tokens=options.max_num_batched_tokens,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
    )


def _run(engine: Engine, requests: list[Request], prefix: str) -> dict[str, _Timeline]:
    for index, request in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=request.num_output, ignore_eos=True)
        engine.add(Sequence(f"{prefix}-{index}", request.prompt, params, seed=0))
    timelines: dict[str, _Timeline] = {}
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            line = timelines.setdefault(output.seq.seq_id, _Timeline(now, now, 0))
            line.last = now
            line.num_tokens += len(output.new_ids)
    for index, request in enumerate(requests):
        assert timelines[f"{prefix}-{index}"].num_tokens == request.num_output
    return timelines


def _measurement(
    requests: list[Request], seconds: float, cpu_seconds: float, **figures: Any
) -> Measurement:
    return Measurement(
        num_requests=len(requests),
        num_prompt_tokens=sum(len(request.prompt) for request in requests),
        num_output_tokens=sum(request.num_output for request in requests),
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        peak_rss_bytes=peak_resident_bytes(),
        **figures,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("workload")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--kv-cache-memory-bytes", type=int)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(json.dumps(asdict(SYSTEMS[options.system](options))))


if __name__ == "__main__":
    main()
