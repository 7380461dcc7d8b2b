"""The repository's own rules."""

import ast
import importlib.util
import itertools
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tidemill.protocol.library import library_source

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


def test_containers_start_processes_that_exist() -> None:
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    modules = [s["entrypoint"][-1] for s in compose["services"].values() if "entrypoint" in s]
    assert sorted(modules) == ["tidemill_gpuworker", "tidemill_scheduler"]
    assert all(importlib.util.find_spec(f"{module}.__main__") for module in modules)
    image = (ROOT / "docker" / "Dockerfile").read_text()
    assert "PYTHONSAFEPATH=1" in image and "USER tidemill" in image


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
