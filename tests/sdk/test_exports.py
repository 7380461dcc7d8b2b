"""The public face of the package: complete, documented, the same in both clients."""

import inspect
import subprocess
import sys
from typing import Any

import pytest

import tidemill
from tidemill import (
    AsyncBestOf,
    AsyncJob,
    AsyncProducer,
    AsyncTokenStream,
    BestOf,
    Job,
    Producer,
    TokenStream,
)
from tidemill.protocol import errors

PAIRS: list[tuple[Any, Any]] = [
    (Producer, AsyncProducer),
    (BestOf, AsyncBestOf),
    (Job, AsyncJob),
    (TokenStream, AsyncTokenStream),
]


def public(thing: Any) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def test_what_is_exported_is_what_is_listed() -> None:
    here = {
        name
        for name, value in vars(tidemill).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert here | {"__version__"} == set(tidemill.__all__)
    assert tidemill.__all__ == sorted(tidemill.__all__)


def test_every_error_a_caller_can_meet_is_exported() -> None:
    internal = {"FencingError", "StaleEpoch", "StaleFence"}
    elsewhere = {
        *("BrokerNotFound", "BrokerRefused", "DataDirectoryInUse", "PortInUse", "EngineFailed"),
        *("NoTokenLeft", "CannotGoOn", "GrammarTooComplex", "SimulationFailed"),
        *("AccessDenied", "Unauthenticated", "Forbidden", "RequestTooLarge"),
        *("ModelError", "ModelNotFound", "DamagedModel", "UnsafeModel", "UnsupportedModel"),
    }
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.TidemillError)
    }
    assert defined - internal - elsewhere <= set(tidemill.__all__)


@pytest.mark.parametrize(("sync", "asynchronous"), PAIRS)
def test_twins_have_the_same_members(sync: Any, asynchronous: Any) -> None:
    assert public(sync) == public(asynchronous)
    for name in public(sync):
        ours, theirs = getattr(sync, name), getattr(asynchronous, name)
        if inspect.isfunction(ours):
            expected = {n: p.default for n, p in inspect.signature(ours).parameters.items()}
            actual = {n: p.default for n, p in inspect.signature(theirs).parameters.items()}
            assert expected == actual, name


@pytest.mark.parametrize("name", [name for name in tidemill.__all__ if name != "__version__"])
def test_everything_public_is_documented(name: str) -> None:
    thing = getattr(tidemill, name)
    if inspect.isclass(thing):
        assert inspect.getdoc(thing)
        for member, value in inspect.getmembers(thing, inspect.isfunction):
            if not member.startswith("_") and value.__module__.startswith("tidemill"):
                assert inspect.getdoc(value), member


def test_importing_the_sdk_needs_neither_torch_nor_a_tokenizer() -> None:
    heavy = "torch triton transformers tokenizers jinja2 typer rich fastapi numpy"
    code = f"import sys, tidemill; print([n for n in {heavy.split()} if n in sys.modules])"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert shown.stdout.strip() == "[]"
