"""Settings of the gateway: its command line over the environment."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tidemill.protocol.errors import ConfigError
from tidemill.service.config import ServiceConfig, load_webhook_config, split_keys

#: As `tidemill up` tries first, and vLLM's.
DEFAULT_PORT = 8000
_MIB = 1 << 20
_TIMES = (
    *("head_seconds", "body_seconds", "reader_seconds", "keep_alive_seconds"),
    *("broker_seconds", "drain_seconds"),
)


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Built once in ``__main__``; sizes are in bytes, times in seconds.

    ``redis_url`` None is the embedded server's address.  With ``require_keys`` callers need a key
    of `tidemill keys` or one of ``api_keys``; without both everybody may call.  On stop,
    streams may take ``drain_seconds`` to finish.  ``upload_bytes`` bounds a file, and
    ``body_bytes`` any other body, of which something must arrive every ``body_seconds``; headers
    must have come within ``head_seconds``.  Who reads nothing for ``reader_seconds`` is cut off.
    ``allow_private_webhooks`` lets callbacks be anywhere, as whoever delivers them must, too.
    """

    redis_url: str | None = None
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_keys: tuple[str, ...] = ()
    require_keys: bool = False
    protect_metrics: bool = False
    allowed_origins: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    root_path: str = ""
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    stream_interval: int = 1
    body_bytes: int = 32 * _MIB
    upload_bytes: int = 512 * _MIB
    head_seconds: float = 30.0
    body_seconds: float = 30.0
    reader_seconds: float = 60.0
    keep_alive_seconds: float = 30.0
    broker_seconds: float = 10.0
    drain_seconds: float = 30.0
    allow_private_webhooks: bool = False
    access_log: bool = False

    def __post_init__(self) -> None:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError(
                "TLS needs both a certificate and its key",
                fix="Give --ssl-certfile and --ssl-keyfile.",
            )
        for path in (self.ssl_certfile, self.ssl_keyfile):
            if path is not None and not path.is_file():
                raise ConfigError(f"there is no file {path}", fix="Correct --ssl-...file.")
        if self.stream_interval < 1:
            raise ConfigError("--stream-interval is not 1 or more", fix="Give a number of tokens.")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} is no TCP port", fix="Give 1 to 65535.")
        for name in _TIMES:
            if not 0 <= getattr(self, name) < math.inf:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} is not a number of seconds", fix=f"Correct {flag}.")
        if any(len(key) < 1 or not key.isprintable() for key in self.api_keys):
            raise ConfigError("an API key is empty or not printable", fix="Correct --api-key.")

    @property
    def scheme(self) -> str:
        """Of the addresses that clients use."""
        return "https" if self.ssl_certfile else "http"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise ``ConfigError`` in place of an exit with several lines."""
        raise ConfigError(message, fix=f"{self.prog} --help lists the options.")


_DESCRIPTION = """\
Serve OpenAI's API over the queue.  It needs a broker, and workers somewhere; `tidemill up` starts
all of them.

  tidemill gateway --redis-url redis://localhost:6379 --port 8000
  curl http://127.0.0.1:8000/v1/models
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Hi"}]}'

Run as many as you like behind a load balancer: they hold no state.
"""

_SECRETS_NOTE = """\
Environment: TIDEMILL_REDIS_URL, TIDEMILL_API_KEY (keys, separated by commas; other users of this
machine see the command line, but not the environment), TIDEMILL_KEY_PEPPER or
TIDEMILL_KEY_PEPPER_FILE (of the keys of `tidemill keys`), TIDEMILL_LOG_LEVEL.
"""


def parse_arguments(
    arguments: Sequence[str] | None, service: ServiceConfig, api_keys: Sequence[str] = ()
) -> GatewaySettings:
    """Read the command line; raises ``ConfigError`` where it is wrong.

    ``api_keys`` are those of the environment.
    """
    options = vars(_parser(service).parse_args(arguments))
    given = options.pop("api_key")
    # An option without a key must not let everybody in.
    keys = tuple(api_keys) if given is None else split_keys(",".join(given)) or ("",)
    sizes = {name: options.pop(f"max_{name}_mb") for name in ("body", "upload")}
    for name, size in sizes.items():
        if not 0 < size < math.inf:
            raise ConfigError(f"--max-{name}-mb must be above 0", fix="Give a number of MiB.")
        options[f"{name}_bytes"] = round(size * _MIB)
    origins = tuple(options.pop("allowed_origins") or ())
    return GatewaySettings(api_keys=keys, allowed_origins=origins, **options)


def _parser(service: ServiceConfig) -> argparse.ArgumentParser:
    parser = _Parser(
        "tidemill gateway",
        description=_DESCRIPTION,
        epilog=_SECRETS_NOTE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_network(parser, service)
    _add_access(parser)
    _add_limits(parser)
    parser.add_argument("--tool-call-parser", help="format of tool calls; the template tells it")
    parser.add_argument("--reasoning-parser", help="format of reasoning; the template tells it")
    parser.add_argument(
        "--stream-interval",
        type=int,
        default=1,
        metavar="TOKENS",
        help="tokens of an event at least, but for a stream's first and last (%(default)d)",
    )
    parser.add_argument(
        "--allow-private-webhooks",
        action="store_true",
        default=load_webhook_config().allow_private,
        help="take a callback_url with http, any port and any address: for development alone",
    )
    parser.add_argument("--access-log", action="store_true", help="log a line for each request")
    return parser


def _add_network(parser: argparse.ArgumentParser, service: ServiceConfig) -> None:
    add = parser.add_argument_group("network").add_argument
    add("--redis-url", default=service.redis_url, help="the broker's address (the embedded one's)")
    add("--host", default="127.0.0.1", help="0.0.0.0 listens on all interfaces (%(default)s)")
    add("--port", type=int, default=DEFAULT_PORT, help="0 takes a free one (%(default)d)")
    add("--root-path", default="", help="prefix that a proxy in front takes off")
    add("--ssl-certfile", type=Path, help="serve HTTPS with this certificate chain (PEM)")
    add("--ssl-keyfile", type=Path, help="and this key")


def _add_access(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("who may call").add_argument
    add(
        "--api-key",
        action="append",
        metavar="KEY",
        help="a key that clients must send as `Authorization: Bearer KEY`; several are separated"
        " by commas, or it is repeated. Without any, everybody may call",
    )
    add(
        "--require-keys",
        action="store_true",
        help="let callers in who have a key of `tidemill keys create`",
    )
    add(
        "--protect-metrics",
        action="store_true",
        help="ask for a key for /metrics and /load too",
    )
    add(
        "--allowed-origins",
        action="append",
        metavar="ORIGIN",
        help="let pages of this origin call (CORS), such as https://app.example.org or '*';"
        " may be repeated",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("limits").add_argument
    add("--max-body-mb", type=float, default=32.0, help="largest body in MiB (%(default)g)")
    add(
        "--max-upload-mb",
        type=float,
        default=512.0,
        help="largest file in MiB (%(default)g); the input of a batch has 200 MB at most anyway",
    )
    add(
        "--head-seconds",
        type=float,
        default=30.0,
        help="longest time for the headers of a request (%(default)g)",
    )
    add(
        "--body-seconds",
        type=float,
        default=30.0,
        help="longest silence while a body is sent (%(default)g)",
    )
    add(
        "--reader-seconds",
        type=float,
        default=60.0,
        help="how long a client may leave its answer unread (%(default)g)",
    )
    add(
        "--keep-alive-seconds",
        type=float,
        default=30.0,
        help="how long an idle connection is kept (%(default)g)",
    )
    add(
        "--broker-seconds",
        type=float,
        default=10.0,
        help="how long to wait for a broker that is away, before 503 (%(default)g)",
    )
    add(
        "--drain-seconds",
        type=float,
        default=30.0,
        help="how long running answers may take to finish on SIGTERM (%(default)g)",
    )
