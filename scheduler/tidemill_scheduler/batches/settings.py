"""How a batch runner works."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from tidemill.protocol.errors import ConfigError
from tidemill.service.config import load_webhook_config


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """Bounds and times of one process.

    A batch whose runner is silent for ``lease_seconds`` is taken over.  ``max_in_flight`` lines of
    a batch are queued or running at once, and ``max_parts`` of its parts are begun and not written;
    ``max_batches`` are worked on at once.  The only one of its tenant keeps its place for
    ``turn_seconds`` at least while others wait.  A line may wait ``model_seconds`` for its model.
    A batch on which ``max_faults`` attempts failed in one place is ended.
    ``allow_private_webhooks`` lets callbacks of lines be anywhere.
    """

    lease_seconds: float = 5.0
    poll_seconds: float = 0.25
    max_in_flight: int = 512
    max_parts: int = 8
    max_batches: int = 4
    turn_seconds: float = 30.0
    model_seconds: float = 30.0
    max_faults: int = 8
    #: Without a batch for so long the process leaves.
    idle_seconds: float = 60.0
    allow_private_webhooks: bool = False

    def __post_init__(self) -> None:
        if self.lease_seconds < _MIN_LEASE_SECONDS or self.max_in_flight < 1:
            raise ConfigError(
                f"a lease of {self.lease_seconds:g} s or {self.max_in_flight} lines in flight"
                " are too few",
                fix=f"Use at least {_MIN_LEASE_SECONDS:g} s and one line.",
            )


_MIN_LEASE_SECONDS = 0.3


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise ``ConfigError`` in place of an exit with several lines."""
        raise ConfigError(message, fix=f"{self.prog} --help lists the options.")


def parse_settings(arguments: Sequence[str] | None) -> RunnerSettings:
    """Read the command line; raises ``ConfigError`` where it is wrong."""
    parser = _Parser("python -m tidemill_scheduler.batches", description="Works on batches.")
    usual = RunnerSettings()
    parser.add_argument(
        "--lease-seconds",
        type=float,
        default=usual.lease_seconds,
        help="silence after which another process takes a batch over (%(default)g)",
    )
    parser.add_argument(
        "--max-in-flight",
        type=int,
        default=usual.max_in_flight,
        help="lines of a batch that are queued or running at once (%(default)d)",
    )
    parser.add_argument(
        "--allow-private-webhooks",
        action="store_true",
        default=load_webhook_config().allow_private,
        help="take callbacks of lines with http, any port and any address: for development alone",
    )
    return RunnerSettings(**vars(parser.parse_args(arguments)))
