"""What the scheduler tells a probe: its role, and whether it gets work out."""

import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

#: A leader with work and an idle worker for it must dispatch something within this time.
STALL_SECONDS = 10.0


class Role(StrEnum):
    """What this process is to its shard."""

    DISCONNECTED = "disconnected"
    STANDBY = "standby"
    LEADER = "leader"


class Health:
    """Written by the event loop, read by the endpoint's threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._role = Role.DISCONNECTED
        self._epoch = 0
        self._runnable_since: float | None = None
        self._beat_at = clock()
        self._durability = ""

    def enter(self, role: Role, epoch: int = 0) -> None:
        """Note a new role; what was true of the old one is forgotten."""
        self._role, self._epoch, self._durability = role, epoch, ""
        self._runnable_since = None
        self._beat_at = self._clock()

    def beat(self) -> None:
        """Note that the leader's loop turns."""
        self._beat_at = self._clock()

    def note_durability(self, level: str) -> None:
        """Note how durable the broker is, as its leader has found."""
        self._durability = level

    def note_work(self, *, runnable: bool, num_dispatched: int) -> None:
        """Note whether work could run, and whether some was sent since the last note."""
        if not runnable:
            self._runnable_since = None
        elif num_dispatched or self._runnable_since is None:
            self._runnable_since = self._clock()

    def check(self) -> tuple[bool, Mapping[str, Any]]:
        """Whether the process does its duty, with details."""
        now = self._clock()
        since = self._runnable_since
        stalled = 0.0 if since is None else now - since
        hung = now - self._beat_at if self._role is Role.LEADER else 0.0
        ok = self._role is not Role.DISCONNECTED and max(stalled, hung) <= STALL_SECONDS
        return ok, {
            "role": self._role,
            "epoch": self._epoch,
            "durability": self._durability,
            "stalled_seconds": round(stalled, 3),
            "loop_silent_seconds": round(hung, 3),
        }
