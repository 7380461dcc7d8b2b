"""What goes wrong is told on one line, with the fix, and leaves nothing behind."""

import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.processes import Outcome, sandbox
from tidemill.cli.main import main
from tidemill.cli.stack import Stack
from tidemill.service.broker import EmbeddedBroker

pytestmark = [pytest.mark.model, pytest.mark.timeout(200)]


def copy_model(source: Path, target: Path) -> Path:
    """A model directory whose files are hard links, until a test replaces one."""
    shutil.copytree(source, target, copy_function=lambda a, b: Path(b).hardlink_to(a))
    return target


def truncate_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    head = weights.read_bytes()[:100_000]
    weights.unlink()
    weights.write_bytes(head)


def pickle_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04")


def no_config(model: Path) -> None:
    (model / "config.json").unlink()


def other_architecture(model: Path) -> None:
    config = (model / "config.json").read_text()
    (model / "config.json").unlink()
    changed = config.replace("LlamaForCausalLM", "RwkvForCausalLM")
    (model / "config.json").write_text(changed.replace('"llama"', '"rwkv"'))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (truncate_weights, "model.safetensors"),
        (no_config, "config.json"),
        # The worker's own tests have these in every run.
        pytest.param(pickle_weights, "pytorch_model.bin", marks=pytest.mark.slow),
        pytest.param(other_architecture, "RwkvForCausalLM", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_cannot_be_served_is_refused(
    damage: Callable[[Path], None], named: str, demo_model_dir: Path, tmp_path: Path
) -> None:
    model = copy_model(demo_model_dir, tmp_path / "model")
    damage(model)
    with sandbox(tmp_path) as box:
        outcome = box.run("up", "--model", str(model))
        assert outcome.status == 1
        assert named in outcome.error


def test_a_model_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with sandbox(tmp_path) as box:
        outcome = box.run("up", "--model", "/does/not/exist")
    assert outcome.status == 1 and "/does/not/exist" in outcome.error


def test_a_data_directory_in_use_is_refused(demo_model_dir: Path, tmp_path: Path) -> None:
    with sandbox(tmp_path) as box, EmbeddedBroker.start(tmp_path / "data", fsync="no"):
        outcome = box.run("up", "--model", str(demo_model_dir))
    assert outcome.status == 1 and str(tmp_path / "data") in outcome.error


def test_a_port_in_use_is_refused(demo_model_dir: Path, tmp_path: Path) -> None:
    with sandbox(tmp_path) as box, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        outcome = box.run("up", "--model", str(demo_model_dir), "--broker-port", str(port))
    assert outcome.status == 1 and str(port) in outcome.error


def test_a_broker_that_is_away_is_named(tmp_path: Path) -> None:
    with sandbox(tmp_path) as box, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{closed.getsockname()[1]}/0"
        outcome = box.run("submit", "hello", "--redis-url", url)
    assert outcome.status == 1 and "broker" in outcome.error


def test_commands_without_a_running_tidemill_say_how_to_start_one(tmp_path: Path) -> None:
    with sandbox(tmp_path) as box:
        for command in (["status"], ["submit", "hello"]):
            outcome = box.run(*command)
            assert outcome.status == 1 and "tidemill up" in outcome.error


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["submit", "--raw", "word " * 3000], "prompt"),
        (["submit", ""], "prompt"),
        (["submit", "--raw", ""], "prompt"),
        (["submit", "hi", "--model", "no-such-model"], "no-such-model"),
        (["submit", "hi", "--max-tokens", "-1"], "max_tokens"),
        (["submit", "hi", "--max-tokens", "100000"], "max_tokens"),
        (["submit", "hi", "--max-tokens", "9" * 25], "max_tokens"),
        (["submit", "caf\udce9"], "surrogate"),
        (["submit", "hi", "--temperature", "9"], "temperature"),
        (["submit", "hi", "--tenant", "a b"], "tenant"),
        (["follow", "no-id"], "job_id"),
        (["cancel", "job_00" + "0" * 26], "job_00"),
    ],
)
def test_a_bad_request_is_refused_before_anything_is_queued(
    args: list[str],
    named: str,
    stack: Stack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TIDEMILL_REDIS_URL", stack.url)
    monkeypatch.setenv("TIDEMILL_DATA_DIR", str(tmp_path / "data"))
    # In this process: to start another one takes longer than all the rest.
    monkeypatch.setattr(sys, "argv", ["tidemill", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    outcome = Outcome(int(ended.value.code or 0), *capsys.readouterr())
    assert outcome.status == 1
    assert named in outcome.error
    assert outcome.stdout == ""
