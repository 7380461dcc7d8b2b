"""A file with one line of JSON for each engine step: what ``tidemill calibrate`` fits a cost to."""

import logging
from pathlib import Path
from types import TracebackType

from pydantic import ValidationError

from tidemill.protocol.errors import ConfigError
from tidemill.protocol.step_cost import StepFeatures

_log = logging.getLogger(__name__)


class StepLog:
    """Appends steps to a file, each line at once; a full disk ends the log and nothing else.

    Raises ``ConfigError`` if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_broken = False
        try:
            self._file = path.open("a", buffering=1, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"the step log {path} cannot be opened: {error.strerror}",
                fix="Name a file in a directory that exists and may be written to.",
            ) from error

    def __enter__(self) -> "StepLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, step: StepFeatures) -> None:
        """Append one step."""
        if self._is_broken:
            return
        try:
            self._file.write(step.model_dump_json() + "\n")
        except OSError as error:
            self._is_broken = True
            _log.warning("no more steps are logged to %s: %s", self._path, error)

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as error:
            _log.warning("the end of %s was not written: %s", self._path, error)


def read_step_log(path: Path) -> list[StepFeatures]:
    """Read a step log; raises ``ConfigError`` naming the line that is not a step.

    A last line without its end is passed over: its worker was killed while it wrote.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the step log {path} cannot be read: {error}",
            fix="Name a file that a worker has written with --step-log.",
        ) from error
    complete, _, _ = text.rpartition("\n")
    lines = complete.split("\n") if complete else []
    return [_parse(path, number, line) for number, line in enumerate(lines, 1)]


def _parse(path: Path, number: int, line: str) -> StepFeatures:
    try:
        return StepFeatures.model_validate_json(line)
    except ValidationError as error:
        raise ConfigError(
            f"{path}, line {number}: this is not a step",
            fix="Name a file that a worker has written with --step-log.",
        ) from error
