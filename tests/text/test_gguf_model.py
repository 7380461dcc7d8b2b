"""GGUF files: converted once, into weights and a tokenizer that are the file's."""

import os
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.golden_models import make_golden_model
from support.model_wheels import SMOLLM2
from support.tiny_gguf import write_tiny_gguf
from support.wait import wait_until
from tidemill.protocol.errors import ConfigError, DamagedModel, ModelError
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.demo import demo_wheel
from tidemill_gpuworker.demo.demo_progress import SilentReport
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.loading import gguf_model
from tidemill_gpuworker.loading.gguf_model import gguf_model_dir
from tidemill_gpuworker.loading.model_config import load_model_config
from tidemill_gpuworker.loading.model_finder import find_model_dir

#: Of a file without tensors and fields.
HEADER = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)


class Conversion:
    """Stands for the conversion: writes one file once it is released."""

    def __init__(self) -> None:
        self.calls = 0
        self.started = threading.Event()
        self.release = threading.Event()
        self.release.set()

    def __call__(self, gguf: Path, out: Path) -> None:
        self.calls += 1
        self.started.set()
        assert self.release.wait(30)
        (out / "config.json").write_bytes(gguf.read_bytes())


class Phases(SilentReport):
    def __init__(self) -> None:
        self.titles: list[str] = []

    def phase(self, title: str) -> None:
        self.titles.append(title)


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch) -> Conversion:
    fake = Conversion()
    monkeypatch.setattr(gguf_model, "convert", fake)
    return fake


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "files" / "tiny.gguf"
    path.parent.mkdir()
    path.write_bytes(HEADER + b"one")
    return path


def test_a_file_is_converted_once(conversion: Conversion, gguf: Path, tmp_path: Path) -> None:
    report = Phases()
    made = gguf_model_dir(gguf, tmp_path, report)
    assert (made / "config.json").read_bytes() == HEADER + b"one"
    assert report.titles == ["Converting tiny.gguf to safetensors (once)"]
    assert find_model_dir(str(gguf), tmp_path, report) == made
    assert find_model_dir(str(gguf.parent), tmp_path, report) == made
    assert conversion.calls == 1


def test_a_file_that_changed_is_converted_anew(
    conversion: Conversion, gguf: Path, tmp_path: Path
) -> None:
    first = gguf_model_dir(gguf, tmp_path, SilentReport())
    gguf.write_bytes(HEADER + b"two")
    os.utime(gguf, ns=(1, 1))
    second = gguf_model_dir(gguf, tmp_path, SilentReport())
    assert (second / "config.json").read_bytes() == HEADER + b"two"
    assert second != first


def test_of_two_processes_one_converts(conversion: Conversion, gguf: Path, tmp_path: Path) -> None:
    conversion.release.clear()
    waiting = Phases()
    found: list[Path] = []

    def call(report: SilentReport) -> None:
        found.append(gguf_model_dir(gguf, tmp_path, report))

    threads = [threading.Thread(target=call, args=(report,)) for report in (Phases(), waiting)]
    threads[0].start()
    assert conversion.started.wait(30)
    threads[1].start()
    wait_until(lambda: waiting.titles, what="the second caller waits for the first")
    conversion.release.set()
    for thread in threads:
        thread.join(30)
    assert conversion.calls == 1
    assert found[0] == found[1]
    assert waiting.titles == ["Waiting for another process that converts tiny.gguf"]


def test_a_conversion_that_fails_leaves_no_model(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf: Path, out: Path) -> None:
        (out / "config.json").write_bytes(b"half of it")
        raise ModelError("no")

    monkeypatch.setattr(gguf_model, "convert", fail)
    with pytest.raises(ModelError):
        gguf_model_dir(gguf, tmp_path, SilentReport())
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".lock"]


def test_what_a_killed_conversion_left_is_cleared_away(
    conversion: Conversion, gguf: Path, tmp_path: Path
) -> None:
    made = gguf_model_dir(gguf, tmp_path, SilentReport())
    (made / "config.json").unlink()
    made.rmdir()
    abandoned = made.with_name(f"{made.name}.killed")
    abandoned.mkdir()
    gguf_model_dir(gguf, tmp_path, SilentReport())
    assert not abandoned.exists()


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"PK")
    with pytest.raises(DamagedModel, match="not a GGUF file"):
        find_model_dir(str(path), tmp_path, SilentReport())


def test_a_cache_that_cannot_be_written_is_named(
    conversion: Conversion, gguf: Path, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(ConfigError, match="the cache directory"):
        gguf_model_dir(gguf, blocked, SilentReport())


@pytest.mark.slow
def test_a_small_model_keeps_its_weights(tmp_path: Path) -> None:
    model = make_golden_model("llama untied")
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(model, path)

    made = gguf_model_dir(path, tmp_path / "cache", SilentReport())

    found = load_file(made / "model.safetensors")
    expected = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=0.0, rtol=0.0, msg=name)
    tokenizer = Tokenizer.from_directory(made)
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.decode(tokenizer.encode("Grüße 12", add_special_tokens=False)) == "Grüße 12"
    runner = ModelRunner(made, dtype="float32", num_blocks=8)
    runner.warm_up()
    assert runner.model_config.max_model_len == model.config.max_position_embeddings


@pytest.mark.slow
def test_a_tensor_that_is_missing_is_not_made_up(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(make_golden_model("llama untied"), path, without="blk.1.ffn_down.weight")

    with pytest.raises(ModelError, match=r"does not hold model\.layers\.1\.mlp\.down_proj\.weight"):
        gguf_model_dir(path, tmp_path / "cache", SilentReport())


@pytest.mark.slow
def test_a_tensor_that_would_be_dropped_is_refused(tmp_path: Path) -> None:
    model = make_golden_model("llama untied")
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(model, path, more={"blk.0.attn_q.bias": [1.0] * model.config.hidden_size})

    with pytest.raises(ModelError, match=r"holds blk\.0\.attn_q\.bias, which"):
        gguf_model_dir(path, tmp_path / "cache", SilentReport())


@pytest.mark.slow
def test_a_stretched_context_is_kept(tmp_path: Path) -> None:
    divisors = [1.0, 1.0, 1.25, 3.0, 8.0, 8.0, 8.0, 8.0]
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(make_golden_model("llama untied"), path, more={"rope_freqs.weight": divisors})

    made = gguf_model_dir(path, tmp_path / "cache", SilentReport())

    rope = load_model_config(made).layers[0].rope
    assert rope is not None
    wanted = [10000.0 ** (-pair / 8) / divisor for pair, divisor in enumerate(divisors)]
    torch.testing.assert_close(rope.inverse_frequencies(16), torch.tensor(wanted))


@pytest.mark.model
@pytest.mark.slow
def test_the_real_file_becomes_the_demo_model(demo_model_dir: Path, tmp_path: Path) -> None:
    gguf = next(SMOLLM2.directory().rglob(demo_wheel.GGUF_NAME))
    made = gguf_model_dir(gguf, tmp_path, SilentReport())
    ours, demo = Tokenizer.from_directory(made), Tokenizer.from_directory(demo_model_dir)
    assert ours.digest == demo.digest
    found, expected = (
        load_file(directory / "model.safetensors") for directory in (made, demo_model_dir)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (struct.pack("<IQQ", 3, 2**31 - 1, 65535), "announces 2,147,483,647 tensors and 65,535"),
        (struct.pack("<IQQ", 3, 1, 0), "announces 1 tensors"),
        (struct.pack("<IQQ", 3, 0, 2**64 - 1), "cannot hold"),
        (struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (struct.pack("<I", 3), "ends within its header"),
        (struct.pack("<IQQ", 3, 0, 1) + b"\xff" * 64, "ends within field 1 of 1"),
    ],
)
def test_a_file_that_holds_less_than_it_announces_is_refused_at_once(
    conversion: Conversion, gguf: Path, tmp_path: Path, header: bytes, reason: str
) -> None:
    gguf.write_bytes(b"GGUF" + header)
    with pytest.raises(DamagedModel, match=reason):
        gguf_model_dir(gguf, tmp_path, SilentReport())
    assert conversion.calls == 0
    assert not (tmp_path / "models").exists()


def test_a_worker_that_is_told_to_end_leaves_no_conversion_behind(
    gguf: Path, tmp_path: Path, redis_url: str
) -> None:
    # Its process takes seconds to import what converts.
    gguf.write_bytes(HEADER + b"nothing")
    worker = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tidemill_gpuworker",
            "--model",
            str(gguf),
            "--redis-url",
            redis_url,
        ],
        env=os.environ | {"TIDEMILL_CACHE_DIR": str(tmp_path / "cache")},
        stderr=subprocess.PIPE,
    )
    with worker:
        converting = wait_until(lambda: children_of(worker.pid))
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 130
    assert not any(Path(f"/proc/{pid}").exists() for pid in converting)
    assert not any(path.is_dir() for path in (tmp_path / "cache" / "models").iterdir())


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
