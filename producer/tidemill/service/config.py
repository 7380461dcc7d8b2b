"""Settings every process shares; the only place that reads ``TIDEMILL_*`` variables."""

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tidemill.protocol.errors import ConfigError
from tidemill.protocol.ids import shard_for_tenant

T = TypeVar("T")

#: How a parent tells its children which descriptor closes when it dies; set by us, not by users.
PARENT_FD_VARIABLE = "TIDEMILL_PARENT_FD"

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
#: As many as two hexadecimal digits can tell apart.
MAX_SHARDS = 256

_SHARD = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Built once at a process's start and passed down.

    ``redis_url`` is None where an embedded server is wanted. ``fixed_shard`` is None unless it was
    set: then a tenant's jobs go to its own of ``num_shards``, and processes serve the first.
    A worker's claim lapses after ``lease_seconds`` without one of its heartbeats, sent every
    ``beat_seconds``.  ``blob_url`` is where files are kept, beside the broker's data by default.
    """

    redis_url: str | None
    data_dir: Path
    cache_dir: Path
    fixed_shard: str | None
    num_shards: int
    log_level: str
    lease_seconds: float
    beat_seconds: float
    blob_url: str = ""

    @property
    def shard(self) -> str:
        """The shard that a scheduler or a worker serves."""
        return self.fixed_shard or "00"

    @property
    def shards(self) -> tuple[str, ...]:
        """All shards that there are, or the fixed one."""
        if self.fixed_shard:
            return (self.fixed_shard,)
        return tuple(f"{number:02x}" for number in range(self.num_shards))

    def shard_of(self, tenant: str) -> str:
        """The shard that holds the jobs of a tenant."""
        return self.fixed_shard or shard_for_tenant(tenant, self.num_shards)

    def __post_init__(self) -> None:
        if not 0 < self.beat_seconds * 2 <= self.lease_seconds:
            raise ConfigError(
                f"a beat of {self.beat_seconds:g} s does not fit twice into a lease of"
                f" {self.lease_seconds:g} s",
                fix="Set TIDEMILL_BEAT_SECONDS to a third of TIDEMILL_LEASE_SECONDS.",
            )


def load_config(environ: Mapping[str, str] | None = None) -> ServiceConfig:
    """Read the environment; raises ``ConfigError`` naming the variable that is wrong."""
    env = _Environment(os.environ if environ is None else environ)
    data_dir = env.read("TIDEMILL_DATA_DIR", _directory, env.xdg_dir("DATA", ".local/share"))
    return ServiceConfig(
        redis_url=env.text("TIDEMILL_REDIS_URL") or None,
        data_dir=data_dir,
        cache_dir=env.read("TIDEMILL_CACHE_DIR", _directory, env.xdg_dir("CACHE", ".cache")),
        fixed_shard=env.read("TIDEMILL_SHARD", parse_shard, None),
        num_shards=env.read("TIDEMILL_SHARDS", _num_shards, 1),
        log_level=env.read("TIDEMILL_LOG_LEVEL", _level, "INFO"),
        lease_seconds=env.read("TIDEMILL_LEASE_SECONDS", _seconds, 10.0),
        beat_seconds=env.read("TIDEMILL_BEAT_SECONDS", _seconds, 3.0),
        blob_url=env.text("TIDEMILL_BLOB_URL") or str(data_dir / "blobs"),
    )


def load_api_keys(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the keys of ``TIDEMILL_API_KEY``, separated by commas; none if it is not set.

    Raises ``ConfigError`` if it is set and holds none: without a key everybody would be let in.
    """
    env = _Environment(os.environ if environ is None else environ)
    text = env.text("TIDEMILL_API_KEY")
    keys = split_keys(text)
    if text and not keys:
        raise ConfigError("TIDEMILL_API_KEY holds no key", fix="Put one into it, or unset it.")
    return keys


def split_keys(text: str) -> tuple[str, ...]:
    """Return the keys of a text, in which commas separate them."""
    return tuple(key for part in text.split(",") if (key := part.strip()))


@dataclass(frozen=True, slots=True)
class KeyConfig:
    """Where the pepper of API keys is: ``pepper`` itself or, if that is empty, a file."""

    pepper: str = field(repr=False)
    pepper_file: Path


def load_key_config(environ: Mapping[str, str] | None = None) -> KeyConfig:
    """Read the environment; the file is in the data directory unless another is named."""
    env = _Environment(os.environ if environ is None else environ)
    default = load_config(environ).data_dir / "key_pepper"
    return KeyConfig(
        pepper=env.text("TIDEMILL_KEY_PEPPER"),
        pepper_file=Path(env.text("TIDEMILL_KEY_PEPPER_FILE") or default),
    )


@dataclass(frozen=True, slots=True)
class WebhookConfig:
    """How webhooks go out.

    ``rq_url`` is the server of RQ's queue, None for the broker itself.  ``secret`` signs the
    callbacks of tenants that have none of their own.  ``allow_private`` lets them go anywhere, also
    over http, for development.
    """

    rq_url: str | None
    secret: str
    allow_private: bool


def load_webhook_config(environ: Mapping[str, str] | None = None) -> WebhookConfig:
    """Read the environment; raises ``ConfigError`` naming the variable that is wrong."""
    env = _Environment(os.environ if environ is None else environ)
    return WebhookConfig(
        rq_url=env.text("TIDEMILL_RQ_URL") or None,
        secret=env.text("TIDEMILL_WEBHOOK_SECRET"),
        allow_private=env.read("TIDEMILL_WEBHOOKS_ALLOW_PRIVATE", _yes_or_no, False),
    )


def load_crash_points(environ: Mapping[str, str] | None = None) -> dict[str, int]:
    """Where ``TIDEMILL_CRASH_AT`` wants this process to die: point name -> pass number."""
    env = _Environment(os.environ if environ is None else environ)
    return env.read("TIDEMILL_CRASH_AT", _crash_points, {})


def take_parent_fd() -> int | None:
    """The descriptor our parent passed to us; a second call, or a child of ours, finds none."""
    text = os.environ.pop(PARENT_FD_VARIABLE, "")
    return int(text) if text.isdecimal() else None


class _Environment:
    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def text(self, name: str) -> str:
        return self._variables.get(name, "").strip()

    def read(self, name: str, parse: Callable[[str], T], default: T) -> T:
        text = self.text(name)
        if not text:
            return default
        try:
            return parse(text)
        except ValueError as error:
            raise ConfigError(
                f"{name} is {text!r}, but must be {error}", fix=f"Correct or unset {name}."
            ) from error

    def xdg_dir(self, kind: str, below_home: str) -> Path:
        # The XDG specification: a relative path is invalid and must be ignored.
        named = Path(self.text(f"XDG_{kind}_HOME"))
        base = named if named.is_absolute() else Path("~").expanduser() / below_home
        return base / "tidemill"


def _directory(text: str) -> Path:
    path = Path(text).expanduser()
    if path.exists() and not path.is_dir():
        raise ValueError("a directory")
    return path.absolute()


def parse_shard(text: str) -> str | None:
    """Return ``text`` if it names a shard; raises ``ValueError`` saying what would."""
    if not _SHARD.fullmatch(text):
        raise ValueError("two lower-case hexadecimal digits, such as 00")
    return text


def _yes_or_no(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("0 or 1")
    return text == "1"


def _num_shards(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_SHARDS:
        raise ValueError(f"a number from 1 to {MAX_SHARDS}")
    return int(text)


def _level(text: str) -> str:
    level = text.upper()
    if level not in _LEVELS:
        raise ValueError(f"one of {', '.join(_LEVELS)}")
    return level


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError("a positive number of seconds")
    return seconds


def _crash_points(text: str) -> dict[str, int]:
    points = {}
    for item in text.split(","):
        name, _, nth = item.strip().partition(":")
        if not name or not (nth or "1").isdecimal() or int(nth or "1") < 1:
            raise ValueError("a comma-separated list of name or name:N")
        points[name] = int(nth or "1")
    return points
