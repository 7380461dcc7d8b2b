"""A server with the users of ``docker/acl``, as an operator would set it up."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import redis

from support.valkey import require_server_binary
from support.wait import wait_until
from tidemill.protocol.functions import ensure_library
from tidemill.service.broker_binary import ServerBinary
from tidemill.service.embedded_broker import ping
from tidemill.service.redis import connect
from tidemill.service.server_process import ServerProcess

ACL_DIR = Path(__file__).parents[2] / "docker" / "acl"
ROLES = (
    *("producer", "gateway", "worker", "scheduler"),
    *("operator", "reader", "deploy", "guest"),
)
PASSWORD = "s3cret"

#: The test's own user, who may do everything and look at the log of refusals.
_TESTER = f"user tester on >{PASSWORD} ~* &* +@all"


@dataclass(frozen=True)
class AclServer:
    """A running server."""

    socket_path: Path

    def url(self, role: str) -> str:
        """The address for one of the users."""
        return f"unix://{role}:{PASSWORD}@{quote(str(self.socket_path))}"

    def client(self, role: str) -> redis.Redis:
        """A connection as one of the users."""
        return connect(self.url(role), retries=0)

    def refusals(self) -> list[dict[str, object]]:
        """What users were refused since the last call, as the server tells it."""
        with self.client("tester") as client:
            log = client.acl_log()
            client.acl_log_reset()
        return [{key: entry[key] for key in ("username", "reason", "object")} for entry in log]


def acl_lines() -> dict[str, str]:
    """The shipped rules, by user."""
    lines = [path.read_text().strip() for path in sorted(ACL_DIR.glob("*.acl"))]
    return {line.split()[1]: line for line in lines}


@contextmanager
def acl_server(
    directory: Path, *, binary: ServerBinary | None = None, load: bool = True
) -> Iterator[AclServer]:
    """Start a server; the deploy user has loaded the functions if ``load`` says so."""
    binary = binary or require_server_binary()
    directory.mkdir(exist_ok=True)
    acl_file = directory / "users.acl"
    lines = [line.replace(" on ", f" on >{PASSWORD} ", 1) for line in acl_lines().values()]
    acl_file.write_text("\n".join([*lines, _TESTER, ""]))
    server = AclServer(directory / "s")
    options = {
        "port": "0",
        "unixsocket": str(server.socket_path),
        "aclfile": str(acl_file),
        "dir": str(directory),
        "save": "",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory": "256mb",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    process = ServerProcess([str(binary.path), *words], log_file=directory / "server.log")
    try:
        with server.client("deploy") as client:
            wait_until(lambda: ping(client) == "ready", 20, "the server answers")
            if load:
                ensure_library(client)
        yield server
    finally:
        process.stop()
