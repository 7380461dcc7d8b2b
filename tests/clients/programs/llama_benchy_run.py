"""llama-benchy: prompts of a book, one at a time and several at once."""

import functools
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

from command_lines import run, script

BASE_URL, MODEL, TOKENIZER_DIR = sys.argv[1:4]
PROMPT_TOKENS, OUTPUT_TOKENS, RUNS = 128, 8, 2
STREAMS = (1, 4)
#: Its own is a novel on the web.
BOOK = "\n".join(f"On day {day} the mill ground {day * 7 % 90} sacks." for day in range(500))


@contextmanager
def book_url(folder: Path) -> Iterator[str]:
    """Serve the book on a free port."""
    (folder / "book.txt").write_text(BOOK)
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/book.txt"
        server.shutdown()


def main() -> None:
    here = Path.cwd()
    with book_url(here) as url:
        printed = run(
            *(script("llama-benchy"), "--base-url", BASE_URL, "--model", MODEL),
            *("--tokenizer", TOKENIZER_DIR, "--book-url", url),
            *("--pp", str(PROMPT_TOKENS), "--tg", str(OUTPUT_TOKENS), "--exact-tg"),
            *("--runs", str(RUNS), "--concurrency", *map(str, STREAMS)),
            *("--exit-on-first-fail", "--save-result", "result.json", "--format", "json"),
            *("--emit-progress", "progress.jsonl"),
            # The book is kept below it.
            HOME=str(here),
        )
    assert "Coherence test PASSED" in printed, printed
    # It falls back on the usage where a chunk has no token ids.
    assert "No complete token_ids" not in printed, printed
    check_requests(here / "progress.jsonl")
    check_results(here / "result.json")
    ran = ["exact output lengths", "token ids in streams", "1 and 4 streams"]
    print(json.dumps({"client": "llama-benchy", "version": version("llama-benchy"), "ran": ran}))


def check_requests(path: Path) -> None:
    events = [json.loads(line) for line in path.read_text().splitlines()]
    ends = [event for event in events if event["type"] == "request_end"]
    assert len(ends) == RUNS * sum(STREAMS), ends
    for end in ends:
        assert not end["error"] and end["total_tokens"] == OUTPUT_TOKENS, end
        # It takes what the chat template adds off the prompt, give or take a merged token.
        assert abs(end["prompt_tokens"] - PROMPT_TOKENS) <= 8, end
    assert events[-1]["type"] == "bench_complete" and events[-1]["status"] == "ok", events[-1]


def check_results(path: Path) -> None:
    told = json.loads(path.read_text())["benchmarks"]
    assert [each["concurrency"] for each in told] == list(STREAMS), told
    for each in told:
        rates = [each[name]["mean"] for name in ("pp_throughput", "tg_throughput", "ttfr")]
        assert all(rate > 0 for rate in rates), each


if __name__ == "__main__":
    main()
