"""Run a server as a child and end it when the process behind standard input is gone.

Started by path as ``python -I -S deathwatch.py <grace seconds> <command> [argument...]``, so it
imports the standard library only and costs a few megabytes.

Standard input is a pipe whose only writer is the launcher and which is never written to: the
kernel closes it however the launcher ends, SIGKILL included, and the end-of-file is the signal.
``PR_SET_PDEATHSIG`` set by the launcher would not do, because it fires when the *thread* that
forked ends; launchers start servers from pool threads. Between this process and the server it is
right: there is one thread, and it covers the case that the watcher itself is killed. Then the
server gets SIGKILL, so that whoever sees the watcher gone may start the next server at once.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_LAUNCHER_FD = 0


def _die_with_watcher() -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    watcher = os.getpid()

    def in_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != watcher:
            os._exit(1)

    return in_child


def _wakeups() -> int:
    # Signals become bytes on a pipe, so that one select waits for the child and the launcher.
    read_end, write_end = os.pipe()
    for end in (read_end, write_end):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return read_end


def _must_stop(wakeup: int) -> bool:
    ready, _, _ = select.select([_LAUNCHER_FD, wakeup], [], [])
    signals = os.read(wakeup, 64) if wakeup in ready else b""
    if signal.SIGTERM in signals:
        return True
    return _LAUNCHER_FD in ready and not os.read(_LAUNCHER_FD, 64)


def _stop(server: subprocess.Popen[bytes], wakeup: int, grace_seconds: float) -> None:
    server.terminate()
    deadline = time.monotonic() + grace_seconds
    while server.poll() is None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            server.kill()
            server.wait()
        elif select.select([wakeup], [], [], remaining)[0]:
            os.read(wakeup, 64)


def main(arguments: list[str]) -> int:
    """Run the command to its end; returns its exit status, ``128 + n`` after signal n."""
    wakeup = _wakeups()
    # close_fds stays off: the server must inherit the lock on its data directory.
    server = subprocess.Popen(
        arguments[1:], stdin=subprocess.DEVNULL, close_fds=False, preexec_fn=_die_with_watcher()
    )
    while server.poll() is None:
        if _must_stop(wakeup):
            _stop(server, wakeup, float(arguments[0]))
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
