"""A gateway that asks for stored keys, beside the one of the site."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

from gateway.conftest import Site, free_port
from support.wait import wait_until
from tidemill._link import Link
from tidemill.access.api_keys import USUAL_SCOPES, ApiKey, KeyScope
from tidemill.access.key_store import KeyStore
from tidemill.cli.gateway_options import GatewayOptions
from tidemill.protocol.keys import ShardKeys

PEPPER = "pepper of the tests"


@dataclass(frozen=True)
class Caller:
    """Somebody with a bearer token."""

    http: httpx.Client
    bearer: str

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request; ``headers`` are sent besides."""
        headers = {"authorization": f"Bearer {self.bearer}", **options.pop("headers", {})}
        return self.http.request(method, path, headers=headers, **options)

    def get(self, path: str) -> httpx.Response:
        """Read something."""
        return self.request("GET", path)

    def post(self, path: str, **options: Any) -> httpx.Response:
        """Send something."""
        return self.request("POST", path, **options)


@dataclass(frozen=True)
class LockedGate:
    """Its address, its log, and who makes keys for it."""

    url: str
    log_path: Path
    store: KeyStore
    http: httpx.Client
    issued: list[str] = field(default_factory=list)

    def key(
        self,
        tenant: str,
        scopes: frozenset[KeyScope] = USUAL_SCOPES,
        **limits: Any,
    ) -> tuple[ApiKey, Caller]:
        """Make a key; returns it and a caller who has it."""
        token, key = self.store.create(tenant, scopes=scopes, **limits)
        self.issued.append(token.text)
        return key, self.caller(token.text)

    def caller(self, bearer: str) -> Caller:
        """Somebody with any bearer token."""
        return Caller(self.http, bearer)


@contextmanager
def locked_gate(site: Site, directory: Path) -> Iterator[LockedGate]:
    """Run one with a log of everything, for the queue of the site."""
    port, log_path = free_port(), directory / "gateway.log"
    options = ("--require-keys", "--access-log", "--protect-metrics", "--head-seconds", "1")
    environment = {
        **os.environ,
        "TIDEMILL_REDIS_URL": site.stack.url,
        "TIDEMILL_KEY_PEPPER": PEPPER,
        "TIDEMILL_DATA_DIR": str(site.data_dir),
        "TIDEMILL_LOG_LEVEL": "DEBUG",
    }
    command = [sys.executable, "-m", "tidemill.gateway", "--port", str(port), *options]
    with (
        log_path.open("wb") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process,
        closing(Link(site.stack.url, "00", 30)) as link,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
    ):
        try:
            wait_until(GatewayOptions(port=port).is_listening, 60, "it does not listen")
            store = KeyStore(link, ShardKeys(), PEPPER.encode())
            yield LockedGate(f"http://127.0.0.1:{port}", log_path, store, http)
        finally:
            process.kill()
