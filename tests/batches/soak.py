"""A large batch while gateway, schedulers, workers and batch runners are killed at random.

``python -m batches.soak [LINES] [KILLS] [SEED]`` from the folder ``tests``, or ``make batch-soak``.
KILLS is of each kind of process.  It ends with status 1 if a line is missing or written twice, if
an answer is wrong, or if a process of ours took more than 300 MB.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil

from support.fake_engine import generate
from support.nodes import free_port
from support.valkey import start_fast_server
from support.wait import wait_until

KINDS = ("gateway", "scheduler", "worker", "runner")
MAX_RSS_MB = 300
ENDPOINT = "/v1/completions"

_TESTS = Path(__file__).resolve().parents[1]
_POLL_SECONDS = 0.1
#: What a step of the pretended model takes.
STEP_SECONDS = 0.002
#: One line in so many cannot be answered.
_BAD_EVERY = 25


def prompt_of(number: int) -> list[int]:
    """The prompt of a line."""
    return [1, 2, 3, number % 251, 1000 + number]


def line_of(number: int) -> dict[str, Any]:
    """A request; every 25th is wrong."""
    body: dict[str, Any] = {"model": "m", "prompt": prompt_of(number), "max_tokens": 2}
    if number % _BAD_EVERY == 0:
        body["temperature"] = -1
    return {"custom_id": f"id-{number}", "method": "POST", "url": ENDPOINT, "body": body}


@dataclass
class Crew:
    """The processes of a run: whoever is killed is started again."""

    url: str
    directory: Path
    port: int
    step_seconds: float = STEP_SECONDS
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    peak_mb: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)

    def start(self) -> None:
        """Start everybody."""
        for name in ("gateway", "scheduler-1", "scheduler-2", "worker-1", "worker-2"):
            self._start(name)

    def look(self) -> None:
        """Start whoever is missing again, and note how much memory everybody takes."""
        for name, process in list(self.processes.items()):
            if process.poll() is not None:
                self._start(name)
        for kind, pid in self.pids():
            with suppress(OSError):
                self._measure(kind, pid)

    def pids(self) -> Iterator[tuple[str, int]]:
        """Every process with its kind; a runner is the child of a scheduler."""
        for name, process in self.processes.items():
            kind = name.partition("-")[0]
            yield kind, process.pid
            if kind == "scheduler":
                yield from (("runner", pid) for pid in _children(process.pid))

    def kill(self, kind: str, choose: random.Random) -> bool:
        """SIGKILL one of a kind; false if there is none just now."""
        pids = [pid for found, pid in self.pids() if found == kind]
        if not pids:
            return False
        os.kill(choose.choice(pids), signal.SIGKILL)
        self.kills[kind] += 1
        return True

    def stop(self) -> None:
        """End everybody."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, name: str) -> None:
        command = {
            "gateway": ["tidemill.gateway", "--port", str(self.port)],
            "scheduler": ["tidemill_scheduler", "--lease-seconds", "2"],
            "worker": ["support.fake_worker", self.url, str(self.step_seconds)],
        }[name.partition("-")[0]]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(_TESTS), os.environ.get("PYTHONPATH", ""))),
            "OMP_WAIT_POLICY": "passive",
            "TIDEMILL_REDIS_URL": self.url,
            "TIDEMILL_DATA_DIR": str(self.directory / "files"),
            "TIDEMILL_CACHE_DIR": str(self.directory / "cache"),
        }
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", *command],
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def _measure(self, kind: str, pid: int) -> None:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                self.peak_mb[kind] = max(self.peak_mb[kind], int(line.split()[1]) // 1024)


@dataclass
class Outcome:
    """What came of a run."""

    batch: dict[str, Any]
    output: list[dict[str, Any]]
    errors: list[dict[str, Any]]
    peak_mb: dict[str, int]
    kills: dict[str, int]
    seconds: float

    def faults(self, num_lines: int) -> list[str]:
        """What is wrong with it."""
        found = Counter(line["custom_id"] for line in (*self.output, *self.errors))
        expected = {f"id-{number}" for number in range(num_lines)}
        faults = [f"{name} is written {n} times" for name, n in found.items() if n != 1]
        faults += [f"{name} is missing" for name in sorted(expected - found.keys())]
        faults += [f"nobody asked for {name}" for name in sorted(found.keys() - expected)]
        faults += filter(None, map(_wrong_answer, self.output))
        faults += filter(None, map(_wrong_error, self.errors))
        counts = {
            "total": num_lines,
            "completed": len(self.output),
            "failed": len(self.errors),
        }
        if self.batch["status"] != "completed" or self.batch["request_counts"] != counts:
            faults.append(f"the batch tells {self.batch['status']} {self.batch['request_counts']}")
        ours = {kind: mb for kind, mb in self.peak_mb.items() if kind != "worker"}
        faults += [f"{kind} took {mb} MB" for kind, mb in ours.items() if mb >= MAX_RSS_MB]
        return faults


def run(
    num_lines: int,
    num_kills: int,
    seed: int,
    directory: Path,
    step_seconds: float = STEP_SECONDS,
) -> Outcome:
    """Work off one batch; ``num_kills`` of each kind of process happen on the way."""
    choose, started = random.Random(seed), time.monotonic()
    with ExitStack() as stack:
        broker = stack.enter_context(start_fast_server(directory / "broker"))
        crew = Crew(broker.url, directory, free_port(), step_seconds)
        stack.callback(crew.stop)
        crew.start()
        client = stack.enter_context(httpx.Client(timeout=30))
        site = _Site(client, f"http://127.0.0.1:{crew.port}", crew)
        batch = site.submit(num_lines)
        for share, kind in _plan(num_kills, choose):
            batch = site.follow(batch, lambda told, share=share: _progress(told) >= share)  # type: ignore[misc]
            if batch["status"] == "completed":
                break
            wait_until(lambda kind=kind: crew.look() or crew.kill(kind, choose))  # type: ignore[misc]
        batch = site.follow(batch, lambda told: told["status"] in ("completed", "failed"))
        output, errors = (site.lines(batch[f"{name}_file_id"]) for name in ("output", "error"))
        return Outcome(
            batch,
            output,
            errors,
            dict(crew.peak_mb),
            dict(crew.kills),
            time.monotonic() - started,
        )


@dataclass
class _Site:
    """The gateway, which is killed now and then: every question is asked until it is answered."""

    client: httpx.Client
    url: str
    crew: Crew

    def submit(self, num_lines: int) -> dict[str, Any]:
        data = b"".join(json.dumps(line_of(n)).encode() + b"\n" for n in range(num_lines))
        file = self._ask(
            lambda: self.client.post(
                f"{self.url}/v1/files",
                data={"purpose": "batch"},
                files={"file": ("in.jsonl", data)},
            )
        ).json()
        asked = {"input_file_id": file["id"], "endpoint": ENDPOINT}
        told: dict[str, Any] = self._ask(
            lambda: self.client.post(f"{self.url}/v1/batches", json=asked)
        ).json()
        return told

    def follow(
        self, batch: dict[str, Any], until: Callable[[dict[str, Any]], bool]
    ) -> dict[str, Any]:
        path = f"{self.url}/v1/batches/{batch['id']}"
        while not until(batch) and batch["status"] not in ("completed", "failed"):
            time.sleep(_POLL_SECONDS)
            batch = self._ask(lambda: self.client.get(path)).json()
            self.crew.look()
        return batch

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        answer = self._ask(lambda: self.client.get(f"{self.url}/v1/files/{file_id}/content"))
        return [json.loads(line) for line in answer.content.splitlines()]

    def _ask(self, ask: Callable[[], httpx.Response]) -> httpx.Response:
        while True:
            self.crew.look()
            try:
                answer = ask()
            except httpx.TransportError:
                time.sleep(_POLL_SECONDS)
                continue
            if answer.status_code < 500:
                assert answer.status_code == 200, answer.text
                return answer
            time.sleep(_POLL_SECONDS)


def _plan(num_kills: int, choose: random.Random) -> list[tuple[float, str]]:
    kills = [(choose.uniform(0.0, 0.9), kind) for kind in KINDS for _ in range(num_kills)]
    return sorted(kills)


def _progress(batch: dict[str, Any]) -> float:
    counts = batch["request_counts"]
    done: int = counts["completed"] + counts["failed"]
    return done / max(1, counts["total"])


def _wrong_answer(line: dict[str, Any]) -> str | None:
    number = int(line["custom_id"].removeprefix("id-"))
    said = line["response"]["body"]["choices"][0]["text"]
    expected = "".join(f"{token} " for token in generate(prompt_of(number), 2))
    return None if said == expected else f"{line['custom_id']} is answered {said!r}"


def _wrong_error(line: dict[str, Any]) -> str | None:
    number = int(line["custom_id"].removeprefix("id-"))
    told = line["response"]
    is_right = number % _BAD_EVERY == 0 and told is not None and told["status_code"] == 400
    return None if is_right else f"{line['custom_id']} failed: {line}"


def _children(pid: int) -> list[int]:
    try:
        children = psutil.Process(pid).children()
        return [c.pid for c in children if "tidemill_scheduler.batches" in c.cmdline()]
    except psutil.Error:
        return []  # it ended while we looked


@contextmanager
def _directory() -> Iterator[Path]:
    if kept := os.environ.get("SOAK_DIR"):
        Path(kept).mkdir(parents=True, exist_ok=True)
        yield Path(kept)
        return
    with tempfile.TemporaryDirectory(prefix="batch-soak-") as name:
        yield Path(name)


def main(arguments: list[str]) -> int:
    """Run once; prints what came of it."""
    numbers = [int(argument) for argument in arguments]
    num_lines, num_kills, seed = (*numbers, *(20_000, 3, 1)[len(numbers) :])
    with _directory() as directory:
        outcome = run(num_lines, num_kills, seed, directory)
    faults = outcome.faults(num_lines)
    told = len(outcome.output) + len(outcome.errors)
    print(
        f"{told:,} of {num_lines:,} lines in {outcome.seconds:.0f} s,"
        f" {len(outcome.errors):,} of them errors; kills {outcome.kills};"
        f" peak RSS in MB {outcome.peak_mb}"
    )
    for fault in faults[:20]:
        print(f"FAULT {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
