"""Interrupts of the demo model's preparation: one is heeded, and never while a child is made."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Interrupts:
    """Turns the first SIGINT or SIGTERM into ``KeyboardInterrupt``, later if one must wait.

    Python handles signals on the main thread between two bytecodes, so plain fields will do; and a
    blocked signal could go to another thread, whose interruption wakes nobody.
    """

    def __init__(self) -> None:
        self.must_wait = False
        self._was_raised = False
        self._is_pending = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        self._is_pending = not self._was_raised
        self.raise_pending()

    def raise_pending(self) -> None:
        if self._is_pending and not self.must_wait:
            self._is_pending, self._was_raised = False, True
            raise KeyboardInterrupt


_interrupts = _Interrupts()


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Let one interrupt unwind the body; a second does not cut short what cleans up.

    A caller may pass on a Ctrl-C that the terminal has sent us already.  Signals that are ignored
    stay so.
    """
    global _interrupts
    _interrupts = _Interrupts()
    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    previous = {number: signal.signal(number, _interrupts.handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def child(command: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Run a process that writes no more once the body is left by an exception.

    ``options`` are those of ``subprocess.Popen``.
    """
    # An interrupt while the process is being made would leave it to itself.
    _interrupts.must_wait = True
    try:
        process = subprocess.Popen(command, **options)
    finally:
        _interrupts.must_wait = False
    with process:
        try:
            _interrupts.raise_pending()
            yield process
        except BaseException:
            process.kill()
            process.wait()
            raise
