"""Requests that schemathesis makes up from the gateway's own document, for every operation."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from clients import install
from clients.conftest import PROGRAMS
from gateway.conftest import free_port
from gateway.speech import save_sure_whisper
from gateway.workers import worker
from support.small_stacks import small_stack
from support.tiny_chat_model import save_tiny_chat_model
from support.tiny_encoders import save_bert, save_cross_encoder
from tidemill.cli.gateway_options import GatewayOptions

pytestmark = pytest.mark.clients("schemathesis")

GROUP = "schemathesis"
MODELS = {"generate": "tiny", "embed": "bert", "score": "judge", "transcribe": "whisper"}
#: Not ``use_after_free``: what a job has produced is kept, although DELETE ends it.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
PHASES = os.environ.get("TIDEMILL_FUZZ_PHASES", "examples,coverage,fuzzing,stateful")
#: Beside those of the phase ``coverage``, which tries each limit of each field.
EXAMPLES_OF_EACH = int(os.environ.get("TIDEMILL_FUZZ_EXAMPLES", "30"))
SEED = int(os.environ.get("TIDEMILL_FUZZ_SEED", "1"))
#: For each request; one that takes longer hangs.
PATIENCE_SECONDS = 60


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A gateway and tiny models of each kind behind it."""
    if (reason := install.missing(GROUP)) is not None:
        pytest.skip(reason)
    port, data_dir = free_port(), tmp_path / "data"
    stack = small_stack(
        save_tiny_chat_model(tmp_path / "tiny"),
        data_dir,
        *("--max-model-len", "512", "--max-num-seqs", "16"),
        *("--kv-cache-memory-bytes", str(64 << 20)),
        name=MODELS["generate"],
        gateway=GatewayOptions(port=port),
    )
    with stack as running, ExitStack() as others:
        for task, save in (
            ("embed", save_bert),
            ("score", save_cross_encoder),
            ("transcribe", save_sure_whisper),
        ):
            name, environ = MODELS[task], {"TIDEMILL_DATA_DIR": str(data_dir)}
            model = save(tmp_path / name)
            others.enter_context(worker(running.url, model, name, environ=environ))
        yield f"http://127.0.0.1:{port}"


@pytest.mark.timeout(2400)
def test_no_request_makes_the_gateway_fail_hang_or_break_its_word(
    url: str, tmp_path: Path, note_client: Callable[..., None]
) -> None:
    report = run(url, tmp_path / "report.json")
    failures = [f"{each['operations']}: {each['title']}" for each in report["failures"]]
    assert report["exit_code"] == 0, (failures, report["errors"])
    assert report["stop_reason"] == "completed"
    operations, cases = report["operations"], report["test_cases"]
    assert operations["tested"] == operations["total"] > 40, operations
    ran = (f"{operations['tested']} operations", f"{cases['generated']} requests")
    note_client("schemathesis", report["schemathesis_version"], *ran)


def run(url: str, report: Path) -> dict[str, Any]:
    command = [
        *(str(install.python_of(GROUP).with_name("st")), "run", f"{url}/openapi.json"),
        *("--phases", PHASES, "--checks", ",".join(CHECKS), "--continue-on-failure"),
        *("--max-examples", str(EXAMPLES_OF_EACH), "--seed", str(SEED)),
        *("--request-timeout", str(PATIENCE_SECONDS), "--generation-database", "none"),
        *("--report", "json", "--report-json-path", str(report), "--no-color"),
    ]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "SCHEMATHESIS_HOOKS": str(PROGRAMS / "schemathesis_hooks.py"),
        "TIDEMILL_FUZZED_MODELS": ",".join(f"{task}={name}" for task, name in MODELS.items()),
    }
    # Its last words are told by pytest where the test fails.
    subprocess.run(command, env=environment, cwd=report.parent, check=False)
    told: dict[str, Any] = json.loads(report.read_text())
    return told
