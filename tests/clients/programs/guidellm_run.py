"""GuideLLM: a benchmark of synthetic prompts, several at once, of chats and of completions."""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from command_lines import run, script

BASE_URL, MODEL, TOKENIZER_DIR = sys.argv[1:4]
REQUESTS, STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 4, 64, 8
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


def main() -> None:
    for name, path in PATHS.items():
        check(benchmark(Path(f"{name}.json"), path))
    ran = [f"{STREAMS} streams of {name}" for name in PATHS]
    print(json.dumps({"client": "guidellm", "version": version("guidellm"), "ran": ran}))


def benchmark(report: Path, path: str) -> dict[str, Any]:
    target = BASE_URL.removesuffix("/v1")
    run(
        *(script("guidellm"), "run"),
        *("--backend", f"kind=openai_http,target={target},model={MODEL},request_format={path}"),
        *("--profile", f"kind=concurrent,streams={STREAMS}"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER_DIR}"),
        "--data",
        f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        *("--output", f"kind=json,path={report}"),
        HF_HUB_OFFLINE="1",
    )
    [told] = json.loads(report.read_text())["benchmarks"]
    return told


def check(told: dict[str, Any]) -> None:
    totals = told["metrics"]["request_totals"]
    assert totals["successful"] == REQUESTS and totals["errored"] == 0, totals
    for request in told["requests"]["successful"]:
        assert request["output_tokens"] == OUTPUT_TOKENS, request
        # A chat's template comes on top.
        assert PROMPT_TOKENS - 4 <= request["prompt_tokens"] <= PROMPT_TOKENS + 40, request


if __name__ == "__main__":
    main()
