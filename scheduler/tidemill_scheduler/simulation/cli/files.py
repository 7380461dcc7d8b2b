"""Files that a command writes at its end, looked at before its work."""

from pathlib import Path

from tidemill.protocol.errors import ConfigError


def check_writable(path: Path, field: str) -> None:
    """Raise ``ConfigError`` naming the field unless a file can be written there."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{field}: {path} is not a file", fix="Name a file to write.")
    try:
        # Only opening tells: permissions say nothing of read-only mounts, nor anything to root.
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except (OSError, ValueError) as error:
        raise cannot_write(path, field, error) from error


def cannot_write(path: Path, field: str, error: Exception) -> ConfigError:
    """Return the error for a file that cannot be written."""
    reason = getattr(error, "strerror", None) or str(error)
    return ConfigError(
        f"{field}: {path} cannot be written: {reason}", fix="Name a file that can be."
    )
