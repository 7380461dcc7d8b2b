"""AIPerf, the successor of GenAI-Perf: a profile of streamed chats."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

from command_lines import run, script

BASE_URL, MODEL, TOKENIZER_DIR = sys.argv[1:4]
REQUESTS, STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 4, 64, 8


def main() -> None:
    run(
        *(script("aiperf"), "profile", "-m", MODEL, "--url", BASE_URL.removesuffix("/v1")),
        *("--endpoint-type", "chat", "--streaming", "--tokenizer", TOKENIZER_DIR),
        *("--concurrency", str(STREAMS), "--request-count", str(REQUESTS)),
        *("--synthetic-input-tokens-mean", str(PROMPT_TOKENS)),
        *("--output-tokens-mean", str(OUTPUT_TOKENS), "--extra-inputs", "ignore_eos:true"),
        *("--use-server-token-count", "--ui", "none", "--artifact-dir", "artifacts"),
    )
    [path] = Path("artifacts").rglob("profile_export_aiperf.json")
    told = json.loads(path.read_text())
    assert told["request_count"]["avg"] == REQUESTS and not told.get("error_summary"), told
    lengths = told["output_sequence_length"]
    assert lengths["min"] == lengths["max"] == OUTPUT_TOKENS, lengths
    assert told["input_sequence_length"]["min"] >= PROMPT_TOKENS, told["input_sequence_length"]
    for name in ("time_to_first_token", "inter_token_latency", "output_token_throughput"):
        assert told[name]["avg"] > 0, told[name]
    # It reads /metrics while it runs.
    metrics = json.loads((path.parent / "server_metrics_export.json").read_text())["metrics"]
    assert {"tidemill_gateway_requests", "tidemill_gateway_tokens"} <= metrics.keys(), (
        metrics.keys()
    )
    ran = [f"{STREAMS} streams of chats", "token counts of the server", "its metrics"]
    print(json.dumps({"client": "aiperf", "version": version("aiperf"), "ran": ran}))


if __name__ == "__main__":
    main()
