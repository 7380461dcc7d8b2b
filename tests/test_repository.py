"""The repository's own rules."""

import ast
import importlib.util
import itertools
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidemill.gateway.config import parse_arguments as parse_gateway
from tidemill.protocol.library import library_source
from tidemill.service.config import ServiceConfig, load_config
from tidemill_gpuworker.options.command_line import parse_config as parse_worker
from tidemill_scheduler.config import parse_arguments as parse_scheduler
from tidemill_webhooks.config import worker_config as parse_webhooks

ROOT = Path(__file__).parents[1]
SOURCE_ROOTS = ("producer", "scheduler", "gpuworker", "kernels")
MAX_FUNCTION_LINES = 40
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


@pytest.mark.parametrize("folder", SOURCE_ROOTS)
def test_a_source_root_is_no_package(folder: str) -> None:
    # A package called "kernels" on the path would shadow the one that transformers looks for.
    assert not (ROOT / folder / "__init__.py").exists()


def test_no_source_root_can_be_imported_as_a_module_of_ours() -> None:
    for folder in SOURCE_ROOTS:
        spec = importlib.util.find_spec(folder)
        assert spec is None or spec.origin is None or not spec.origin.startswith(str(ROOT))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_typed_and_checked_for_its_imports(package: str) -> None:
    name = Path(package).name
    assert (ROOT / package / "py.typed").exists()
    assert name in PYPROJECT["tool"]["mypy"]["packages"]
    assert name in PYPROJECT["tool"]["importlinter"]["root_packages"]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "gpuworker").rglob("*.py")), ids=lambda path: path.stem
)
def test_no_function_of_the_worker_is_longer_than_a_page(path: Path) -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, functions))
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in found}
    assert not {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES}


def test_every_package_of_a_source_root_is_in_the_wheel() -> None:
    found = {
        str(p.parent.relative_to(ROOT))
        for f in SOURCE_ROOTS
        for p in ROOT.glob(f"{f}/*/__init__.py")
    }
    assert found == set(PACKAGES)


def test_continuous_integration_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert script[-1] == "make test"
    assert re.search(r"^make test\b", (ROOT / "README.md").read_text(), re.MULTILINE)


def test_every_direct_dependency_is_pinned() -> None:
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    }
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *itertools.chain.from_iterable(extras)]
    names = {re.split(r"[\[<>=; ]", item)[0].lower() for item in wanted} - {"tidemill"}
    assert names <= pinned


#: How each process of a container reads its command line.
PARSERS: dict[str, Callable[[Sequence[str], ServiceConfig], Any]] = {
    "tidemill.gateway": lambda words, service: parse_gateway(words, service, ()),
    "tidemill_gpuworker": parse_worker,
    "tidemill_scheduler": parse_scheduler,
    "tidemill_webhooks": parse_webhooks,
}


def containers() -> dict[str, Any]:
    """Our services as compose reads them: with defaults for variables that are not set."""
    text = (ROOT / "docker" / "compose.yaml").read_text()
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    text = re.sub(r"\$\{\w+:\?[^}]*\}", "/models/one", text)
    assert "$" not in text
    compose = yaml.safe_load(text)
    assert {volume.partition(":")[0] for _, volume in mounts(compose)} <= {
        *compose["volumes"],
        "/models/one",
    }
    return {name: one for name, one in compose["services"].items() if "entrypoint" in one}


def mounts(compose: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of a service and one of its volumes."""
    for name, service in compose["services"].items():
        yield from ((name, volume) for volume in service.get("volumes", ()))


def test_containers_start_processes_that_exist() -> None:
    modules = [service["entrypoint"][-1] for service in containers().values()]
    assert sorted(modules) == sorted(PARSERS)
    assert all(importlib.util.find_spec(f"{module}.__main__") for module in modules)
    image = (ROOT / "docker" / "Dockerfile").read_text()
    assert "PYTHONSAFEPATH=1" in image and "USER tidemill" in image


@pytest.mark.parametrize("name", sorted(containers()))
def test_the_command_of_a_container_is_one_that_its_process_takes(name: str) -> None:
    service = containers()[name]
    environment = {key: value for key, value in service["environment"].items() if value}
    config = load_config(environment)
    settings = PARSERS[service["entrypoint"][-1]](service["command"], config)
    assert settings.redis_url == "redis://broker:6379/0"
    probe = service["healthcheck"]["test"]
    assert probe[:3] == ["CMD", "python", "-c"]
    ast.parse(probe[3])
    port = getattr(settings, "metrics_port", None) or settings.port
    path = "health" if name == "gateway" else "healthz"
    assert f"'http://127.0.0.1:{port}/{path}'" in probe[3]


def test_containers_that_read_files_share_their_volume() -> None:
    for name in ("gateway", "scheduler", "worker"):
        service = containers()[name]
        assert f"files:{service['environment']['TIDEMILL_BLOB_URL']}" in service["volumes"]
    # A new volume has the owner of the image's folder, which must be the one that writes.
    user, made = (
        (ROOT / "docker" / "Dockerfile").read_text().index(words)
        for words in ("USER tidemill", "mkdir -p .cache blobs")
    )
    assert user < made


def test_the_documented_variables_are_the_ones_that_are_read() -> None:
    config = (ROOT / "producer/tidemill/service/config.py").read_text()
    read = set(re.findall(r'env\.\w+\("(TIDEMILL_\w+)"', config)) - {"TIDEMILL_CRASH_AT"}
    documented = set(re.findall(r"^\| `(TIDEMILL_\w+)`", (ROOT / "README.md").read_text(), re.M))
    assert documented == read


def test_the_documented_functions_are_the_ones_of_the_library() -> None:
    lua = library_source()
    registered = set(re.findall(r"^register_function\('(\w+)'", lua, re.MULTILINE))
    documented = set(
        re.findall(r"^\| `tm2_(\w+)`", (ROOT / "docs/redis-keys.md").read_text(), re.M)
    )
    assert documented == registered
