"""The process: its settings, its port, its document, and how it ends."""

import asyncio
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest

from gateway.client import ask
from gateway.conftest import Site, free_port
from support.tls import make_authority
from support.wait import wait_until
from tidemill.cli.gateway import choose_port
from tidemill.cli.gateway_options import GatewayOptions
from tidemill.gateway.__main__ import main
from tidemill.gateway.app import create_app
from tidemill.gateway.config import GatewaySettings, parse_arguments
from tidemill.gateway.openai_models.chat import ChatCompletion
from tidemill.gateway.openai_models.completions import Completion
from tidemill.gateway.openai_models.models import ModelList
from tidemill.gateway.routes import health
from tidemill.gateway.server import check_certificate, listen
from tidemill.gateway.state import GatewayState
from tidemill.protocol.errors import ConfigError, PortInUse
from tidemill.service.config import load_api_keys, load_config

SERVICE = load_config({})


@contextmanager
def gateway(redis_url: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a gateway of our own; yields its process and its address."""
    port = free_port()
    command = [sys.executable, "-m", "tidemill.gateway", "--port", str(port), *options]
    environment = {**os.environ, "TIDEMILL_REDIS_URL": redis_url}
    with subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE) as process:
        try:
            wait_until(GatewayOptions(port=port).is_listening, 60, "it does not listen")
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@asynccontextmanager
async def in_process(settings: GatewaySettings) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application that needs no process."""
    state = GatewayState(settings)
    transport = httpx.ASGITransport(create_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client
    await state.close()


def test_a_stream_is_finished_before_the_gateway_ends(site: Site) -> None:
    body = {"prompt": "hello", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with gateway(site.stack.url) as (process, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.terminate()
            told = [line for line in lines if line]
        assert process.wait(30) == 0
    assert told[-1] == "data: [DONE]" and '"finish_reason":"length"' in told[-2]


def test_a_stream_that_takes_too_long_is_told_that_the_gateway_stops(site: Site) -> None:
    body = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True, "stream": True, "n": 8}
    with gateway(site.stack.url, "--drain-seconds", "1") as (process, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.terminate()
            told = [line for line in lines if line]
        assert process.wait(30) == 0
    assert '"code":"stopping"' in told[-2] and told[-1] == "data: [DONE]"


def test_a_port_that_is_taken_is_named(site: Site) -> None:
    port = int(site.url.rpartition(":")[2])
    with pytest.raises(PortInUse) as refused:
        listen("127.0.0.1", port)
    assert f"port {port}" in refused.value.one_line() and "--port" in refused.value.fix


def test_a_wrong_command_line_is_one_line_and_not_worth_another_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--port", "70000"]) == 2
    assert capsys.readouterr().err.startswith("error: --port 70000 is no TCP port")


def test_https_is_served_with_a_certificate_and_its_key(tmp_path: Path) -> None:
    authority, other = make_authority(tmp_path / "a"), make_authority(tmp_path / "b")
    files = ("--ssl-certfile", str(authority.certificate), "--ssl-keyfile", str(authority.key))
    context = ssl.create_default_context(cafile=authority.ca)
    with gateway(f"unix://{tmp_path}/none.sock", *files) as (_, url):
        address = url.replace("http://127.0.0.1", "https://localhost")
        assert httpx.get(f"{address}/version", verify=context).status_code == 200
    mixed = GatewaySettings(ssl_certfile=authority.certificate, ssl_keyfile=other.key)
    with pytest.raises(ConfigError) as refused:
        check_certificate(mixed)
    assert str(other.key) in refused.value.one_line()


def test_only_a_port_that_was_not_asked_for_is_replaced() -> None:
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert choose_port("127.0.0.1", None, port) > port
        with pytest.raises(PortInUse) as refused:
            choose_port("127.0.0.1", port, port)
    assert str(port) in refused.value.one_line()


def test_the_help_teaches_by_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--help"], SERVICE)
    shown = capsys.readouterr().out
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in shown
    assert "TIDEMILL_API_KEY" in shown and "--ssl-certfile" in shown


def test_keys_of_the_command_line_go_before_those_of_the_environment() -> None:
    keys = load_api_keys({"TIDEMILL_API_KEY": " a , b,"})
    assert keys == ("a", "b")
    assert parse_arguments([], SERVICE, keys).api_keys == ("a", "b")
    assert parse_arguments(["--api-key", "c"], SERVICE, keys).api_keys == ("c",)
    several = ["--api-key", "c, d", "--api-key", "e"]
    assert parse_arguments(several, SERVICE, keys).api_keys == ("c", "d", "e")
    assert load_api_keys({"TIDEMILL_API_KEY": " "}) == ()
    with pytest.raises(ConfigError, match="TIDEMILL_API_KEY holds no key"):
        load_api_keys({"TIDEMILL_API_KEY": ", "})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--port", "70000"], "--port"),
        (["--ssl-certfile", "x"], "--ssl-keyfile"),
        (["--ssl-certfile", "/none", "--ssl-keyfile", "/none"], "/none"),
        (["--drain-seconds", "nan"], "--drain-seconds"),
        (["--max-body-mb", "0"], "--max-body-mb"),
        (["--api-key", ""], "--api-key"),
        (["--api-key", " ,"], "--api-key"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_a_wrong_setting_is_named(arguments: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_arguments(arguments, SERVICE)
    assert named in refused.value.one_line()


async def test_pages_of_allowed_origins_alone_may_call() -> None:
    asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
    settings = GatewaySettings(allowed_origins=("https://app.example",), api_keys=("secret",))
    async with in_process(settings) as client:
        allowed = await client.options("/v1/chat/completions", headers=asked)
        other = await client.options(
            "/v1/chat/completions", headers={**asked, "origin": "https://other.example"}
        )
        refused = await client.get("/v1/models", headers={"origin": "https://app.example"})
    assert allowed.status_code == 200 and other.status_code == 400
    # A page reads the error too.
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"


def test_the_document_describes_what_is_told(site: Site) -> None:
    document = httpx.get(f"{site.url}/openapi.json").json()
    for path in ("/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize", "/health"):
        assert path in document["paths"]
    operations = [each for path in document["paths"].values() for each in path.values()]
    assert len({each["operationId"] for each in operations}) == len(operations)
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "default" in chat["responses"]
    messages = [{"role": "user", "content": "x"}]
    told = ask(site, "/v1/chat/completions", messages=messages, max_tokens=2, logprobs=True)
    ChatCompletion.model_validate(told, extra="forbid")
    told = ask(site, "/v1/completions", prompt="x", max_tokens=2, logprobs=1, prompt_logprobs=1)
    Completion.model_validate(told, extra="forbid")
    ModelList.model_validate(httpx.get(f"{site.url}/v1/models").json(), extra="forbid")


def test_the_document_links_each_id_to_what_takes_it(site: Site) -> None:
    paths = httpx.get(f"{site.url}/openapi.json").json()["paths"]
    made = paths["/v1/jobs"]["post"]["responses"]["202"]["links"]
    taken = [
        operation["operationId"]
        for path, operations in paths.items()
        for operation in operations.values()
        if "{job_id}" in path
    ]
    assert sorted(made) == sorted(taken) and len(taken) > 3
    assert all(link["parameters"] == {"job_id": "$response.body#/id"} for link in made.values())


def test_probes_and_scrapers_are_answered(site: Site) -> None:
    assert httpx.get(f"{site.url}/health").content == b""
    assert httpx.get(f"{site.url}/ping").status_code == 200
    assert set(httpx.get(f"{site.url}/version").json()) == {"version"}
    assert httpx.get(f"{site.url}/load").json() == {"server_load": 0}
    head, metrics = httpx.head(f"{site.url}/metrics"), httpx.get(f"{site.url}/metrics")
    assert head.status_code == 200 and head.content == b""
    families = {line.split()[2] for line in metrics.text.splitlines() if line.startswith("# TYPE")}
    helped = {line.split()[2] for line in metrics.text.splitlines() if line.startswith("# HELP")}
    assert families == helped and "tidemill_gateway_requests_total" in families
    assert all(":" not in name for name in families)


async def test_a_broker_that_is_away_makes_the_gateway_unhealthy(tmp_path: Path) -> None:
    settings = GatewaySettings(redis_url=f"unix://{tmp_path}/none.sock", broker_seconds=0.3)
    async with in_process(settings) as client:
        health = await client.get("/health")
        answer = await client.post("/v1/completions", json={"prompt": "x"})
    assert health.status_code == 503 and health.content == b""
    assert answer.status_code == 503 and answer.headers["retry-after"] == "2"
    assert answer.json()["error"]["code"] == "unavailable"


async def test_a_broker_that_hangs_makes_the_gateway_unhealthy_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_PATIENCE_SECONDS", 0.05)
    settings = GatewaySettings(redis_url=f"unix://{tmp_path}/s", broker_seconds=50.0)
    with socket.socket(socket.AF_UNIX) as broker:
        broker.bind(f"{tmp_path}/s")
        # It lets clients connect, and never says anything.
        broker.listen()
        async with in_process(settings) as client, asyncio.timeout(30):
            answer = await client.get("/health")
    assert answer.status_code == 503


def test_callbacks_on_our_side_are_allowed_by_an_option_or_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TIDEMILL_WEBHOOKS_ALLOW_PRIVATE", raising=False)
    assert not parse_arguments([], SERVICE).allow_private_webhooks
    assert parse_arguments(["--allow-private-webhooks"], SERVICE).allow_private_webhooks
    monkeypatch.setenv("TIDEMILL_WEBHOOKS_ALLOW_PRIVATE", "1")
    assert parse_arguments([], SERVICE).allow_private_webhooks
