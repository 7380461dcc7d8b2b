"""The pepper: what digests of keys are made with, kept apart from the broker that has them."""

import contextlib
import os
import secrets
from pathlib import Path

from tidemill.protocol.errors import ConfigError
from tidemill.service.config import KeyConfig

_NUM_BYTES = 32
_FEWEST_BYTES = 16
_HIDDEN = 0o600


def read_pepper(config: KeyConfig) -> bytes:
    """Return the pepper; raises ``ConfigError`` if there is none, or one that is too short."""
    if config.pepper:
        return _checked(config.pepper.encode(), "TIDEMILL_KEY_PEPPER")
    path = config.pepper_file
    try:
        return _checked(path.read_bytes().strip(), str(path))
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no pepper for API keys at {path}",
            fix="Make the first key with `tidemill keys create`, then give its file to every"
            " gateway: TIDEMILL_KEY_PEPPER_FILE.",
        ) from error
    except OSError as error:
        raise ConfigError(
            f"the pepper for API keys at {path} cannot be read: {error.strerror}",
            fix="Let this user read it, or set TIDEMILL_KEY_PEPPER_FILE.",
        ) from error


def make_pepper(config: KeyConfig) -> bytes:
    """Return the pepper, after writing a random one if its file is not there."""
    if not config.pepper and not config.pepper_file.exists():
        with contextlib.suppress(FileExistsError):
            _write(config.pepper_file, secrets.token_hex(_NUM_BYTES).encode())
    return read_pepper(config)


def _write(path: Path, pepper: bytes) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _HIDDEN)
        with os.fdopen(handle, "wb") as file:
            file.write(pepper + b"\n")
            file.flush()
            os.fsync(file.fileno())
        # A link: whole or not at all, and never in place of another's.
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError as error:
        raise ConfigError(
            f"the pepper for API keys cannot be written to {path}: {error.strerror}",
            fix="Set TIDEMILL_KEY_PEPPER_FILE to a file that this user may write.",
        ) from error
    finally:
        draft.unlink(missing_ok=True)


def _checked(pepper: bytes, where: str) -> bytes:
    if len(pepper) < _FEWEST_BYTES:
        raise ConfigError(
            f"the pepper for API keys of {where} is shorter than {_FEWEST_BYTES} bytes",
            fix="Use 32 random bytes in hexadecimal, such as of `openssl rand -hex 32`.",
        )
    return pepper
