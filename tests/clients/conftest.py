"""Running programs of clients, each in the environment of its group, and noting how it went."""

import json
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from clients import install
from clients.matrix import Outcome, record
from clients.mill import Mill, client_environment, running_mill

PROGRAMS = Path(__file__).parent / "programs"
#: The group of programs that run in the environment of the tests.
DEV = "dev"
#: The group of programs that run in the environment of `make vllm-check`.
VLLM = "vllm"
VLLM_VENV = Path(__file__).parents[2] / ".venv-vllm"
_TOLD = pytest.StashKey[list[dict[str, Any]]]()
_OUTCOMES = pytest.StashKey[list[Outcome]]()


class RunClient(Protocol):
    """Runs a program of a client against the mill and returns what it tells of itself."""

    def __call__(
        self,
        group: str,
        program: str,
        *args: str,
        timeout: float = 600,
        env: dict[str, str | None] | None = None,
    ) -> dict[str, Any]:
        """Give it the mill's address, the model's name, ``args``, and a changed environment."""


@pytest.fixture(scope="session")
def mill(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mill]:
    """The stack that all clients talk to."""
    with running_mill(demo_model_dir, tmp_path_factory.mktemp("mill")) as running:
        yield running


@pytest.fixture
def run_client(request: pytest.FixtureRequest, tmp_path: Path) -> RunClient:
    """``programs/NAME.py`` or ``node/NAME.mjs`` as a process; skips where it is not installed."""

    def run(
        group: str,
        program: str,
        *args: str,
        timeout: float = 600,
        env: dict[str, str | None] | None = None,
    ) -> dict[str, Any]:
        command = _command(group, program)
        # Only now, so that nothing starts for a client that is not there.
        mill: Mill = request.getfixturevalue("mill")
        done = subprocess.run(
            [*command, mill.url, mill.model, *args],
            env=client_environment(**(env or {})),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, f"{program}: {done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        assert told["ran"], f"{program} has run nothing"
        request.node.stash.setdefault(_TOLD, []).append(told)
        return told

    return run


def _command(group: str, program: str) -> list[str]:
    if group == DEV:
        return [sys.executable, str(PROGRAMS / program)]
    if group == VLLM:
        if not (VLLM_VENV / ".installed").is_file():
            pytest.skip("vLLM is not installed; `make vllm-check` installs it")
        return [str(VLLM_VENV / "bin" / "python"), str(PROGRAMS / program)]
    if (reason := install.missing(group)) is not None:
        pytest.skip(reason)
    if group == install.NODE:
        return ["node", str(install.NODE_FOLDER / program)]
    return [str(install.python_of(group)), str(PROGRAMS / program)]


@pytest.fixture
def note_client(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Notes what a client did that the test itself has called."""

    def note(client: str, version: str, *ran: str) -> None:
        told = {"client": client, "version": version, "ran": list(ran)}
        request.node.stash.setdefault(_TOLD, []).append(told)

    return note


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-matrix",
        choices=("all", "merge"),
        nargs="?",
        const="all",
        help="write the table of docs/compatibility.md; merge keeps clients that were not run",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The demo model takes its time where others compute too; a program's own limit is lower.
    for item in items:
        if item.get_closest_marker("clients") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    marker = item.get_closest_marker("clients")
    is_last_word = report.when == "call" or report.outcome != "passed"
    if marker is not None and is_last_word:
        outcomes = item.session.stash.setdefault(_OUTCOMES, [])
        outcomes.append(_outcome(item, report, marker))
    return report


def _outcome(item: pytest.Item, report: pytest.TestReport, marker: pytest.Mark) -> Outcome:
    told = item.stash.get(_TOLD, [])
    return Outcome(
        client=marker.args[0],
        version=", ".join(dict.fromkeys(each["version"] for each in told)),
        ran=tuple(name for each in told for name in each["ran"]),
        flaw=_flaw(item, report),
        notes=marker.kwargs.get("notes", ""),
    )


def _flaw(item: pytest.Item, report: pytest.TestReport) -> str | None:
    if report.outcome == "passed":
        return None
    if report.outcome == "skipped":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        return f"not run: {reason.removeprefix('Skipped: ')}"
    return f"**fails**: {item.name.removeprefix('test_').replace('_', ' ')}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    outcomes: list[Outcome] = session.stash.get(_OUTCOMES, [])
    how = session.config.getoption("record_matrix", default=None)
    if how is not None:
        record(outcomes, keep_others=how == "merge")
