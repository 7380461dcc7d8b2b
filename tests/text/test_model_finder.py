"""What --model may say: directories, GGUF files and names on a hub."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fake_hub import COMMIT, FakeHub, serve_hub
from support.golden_models import make_golden_model, save_golden_model
from tidemill.cli.model import find_model
from tidemill.protocol.errors import ModelNotFound
from tidemill.service.model_name import HubName, default_served_name, parse_hub_name
from tidemill_gpuworker.demo.demo_progress import SilentReport
from tidemill_gpuworker.engine.model_runner import ModelRunner
from tidemill_gpuworker.loading.model_finder import find_model_dir

WANTED = {
    *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"),
    *("chat_template.jinja", "1_Pooling/config.json"),
}
UNWANTED = {"pytorch_model.bin", "original/weights.safetensors", "README.md", "modeling_own.py"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    saved = save_golden_model(
        make_golden_model("llama untied"), tmp_path_factory.mktemp("tiny") / "tiny"
    )
    # Some files alike: a hub keeps them once.
    files = dict.fromkeys(WANTED | UNWANTED, b"{}")
    files |= {path.name: path.read_bytes() for path in saved.iterdir()}
    refusals = {"org/gated": (403, "GatedRepo"), "org/broken": (500, "")}
    with serve_hub(FakeHub(files, refusals=refusals)) as served:
        yield served


class Finder:
    """Runs the finder in a process with a Hugging Face cache of its own."""

    def __init__(self, home: Path, endpoint: str) -> None:
        self._home = home
        self.endpoint = endpoint

    def run(self, model: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        settings = {"HF_HOME": str(self._home), "HF_ENDPOINT": self.endpoint, **environment}
        program = "tidemill_gpuworker.loading.model_finder"
        command = [sys.executable, "-m", program, model, "--quiet"]
        return subprocess.run(
            [*command, "--cache-dir", str(self._home / "tidemill")],
            env=inherited | settings,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def refusal(self, model: str, **environment: str) -> str:
        done = self.run(model, **environment)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        return done.stderr


@pytest.fixture
def finder(hub: FakeHub, tmp_path: Path) -> Finder:
    hub.requests.clear()
    return Finder(tmp_path, hub.url)


def test_a_model_of_a_hub_is_downloaded_once_without_its_pickles(
    hub: FakeHub, finder: Finder
) -> None:
    done = finder.run("org/tiny@v1")
    assert (done.returncode, done.stderr) == (0, "")
    directory = Path(done.stdout.strip())
    assert directory.name == COMMIT
    found = {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}
    assert found == WANTED
    assert hub.downloads() <= WANTED
    assert "GET /api/models/org/tiny/revision/v1" in hub.requests
    assert ModelRunner(directory, dtype="float32", num_blocks=4).num_blocks == 4

    hub.requests.clear()
    again = finder.run("org/tiny")
    assert again.stdout == done.stdout
    assert not hub.downloads()

    away = finder.run("org/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    offline = finder.run("org/tiny", HF_HUB_OFFLINE="1")
    assert away.stdout == offline.stdout == done.stdout


@pytest.mark.slow
def test_what_a_hub_does_not_give_is_named(finder: Finder) -> None:
    assert "no such model" in finder.refusal("org/other")
    assert "no revision v9 of org/tiny" in finder.refusal("org/tiny@v9")
    assert "HF_TOKEN" in finder.refusal("org/gated")
    assert "no config.json on the hub" in finder.refusal("org/empty")
    assert "500" in finder.refusal("org/broken")


def test_a_hub_that_cannot_be_reached_is_told_with_the_fix(finder: Finder) -> None:
    for environment in ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}):
        line = finder.refusal("org/tiny", **environment)
        assert "org/tiny is not in the local cache" in line
        assert "HF_HOME" in line


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("org/name", HubName("org/name")),
        ("org/name-2.5_B@v1.0", HubName("org/name-2.5_B", "v1.0")),
        ("org/name@refs/pr/1", HubName("org/name", "refs/pr/1")),
        ("name", None),
        ("./org/name", None),
        ("../name", None),
        ("/org/name", None),
        ("~/name", None),
        ("a/b/c", None),
        ("org/file.gguf", None),
        ("org/name@", None),
        ("org/na me", None),
        ("", None),
    ],
)
def test_names_on_a_hub_are_told_from_paths(model: str, expected: HubName | None) -> None:
    assert parse_hub_name(model) == expected


def test_a_directory_goes_before_a_name_on_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_hub_name("org/name") is None
    assert find_model_dir("org/name", tmp_path, SilentReport()) == Path("org/name")


def test_a_model_is_served_under_its_own_name(tmp_path: Path) -> None:
    assert default_served_name("org/name@v1") == "org/name"
    assert default_served_name(str(tmp_path / "model")) == "model"
    assert default_served_name("/models/Smol-Q4.gguf") == "Smol-Q4"


def test_what_is_neither_here_nor_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="'a/b/c'") as caught:
        find_model_dir("a/b/c", tmp_path, SilentReport())
    assert "organisation/name" in caught.value.one_line()


def test_the_command_line_tells_the_finders_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no directory or GGUF file 'nowhere'"):
        find_model("nowhere", tmp_path, quiet=True)


def test_of_several_gguf_files_one_must_be_named(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"a\.gguf, b\.gguf"):
        find_model_dir(str(tmp_path), tmp_path, SilentReport())
