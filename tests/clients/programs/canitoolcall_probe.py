"""canitoolcall: tool calls in nine situations, whole and as streams.

What a model of 135 million parameters makes of a situation is its own affair, and fails some. What
is asked of the server: every answer is well-formed, streams tell what whole answers tell, calls
that are demanded come, and no markup is left in texts.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from command_lines import run, script

BASE_URL, MODEL = sys.argv[1:3]
#: How the verdicts begin that blame the model's choice alone.
MODELS_CHOICE = (
    *("expected at least", "expected calls", "expected no tool call", "expected a content answer"),
    *("argument values lost", "got ["),
)
#: Where the call is demanded.
CERTAIN = ("forced-tool-choice",)


def main() -> None:
    report = Path("report.json")
    run(
        *(script("canitoolcall"), "probe", "--base-url", BASE_URL, "--model", MODEL),
        *("--timeout", "900", "--concurrency", "8", "--json", str(report)),
        # 1 says that some check has failed.
        statuses=(0, 1),
    )
    told = json.loads(report.read_text())
    outcomes = told["outcomes"]
    assert len(outcomes) == 27 and told["summary"]["error"] == told["summary"]["skip"] == 0, told
    for outcome in outcomes:
        check(outcome)
    passed = told["summary"]["pass"]
    ran = [f"9 situations whole and streamed: {passed} of {len(outcomes)} checks pass"]
    name = "canitoolcall"
    print(json.dumps({"client": name, "version": version(name), "ran": ran}))


def check(outcome: dict[str, Any]) -> None:
    assert not outcome["warnings"], outcome
    if outcome["status"] == "pass":
        return
    assert outcome["check"] == "scenario", outcome
    assert outcome["scenario_id"] not in CERTAIN, outcome
    verdicts = outcome["detail"].split("; ")
    assert all(verdict.startswith(MODELS_CHOICE) for verdict in verdicts), outcome


if __name__ == "__main__":
    main()
