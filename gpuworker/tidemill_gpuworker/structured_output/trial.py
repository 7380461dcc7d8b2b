"""Tries grammars out in a process of its own, which ends what takes too much."""

import json
import os
import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple

#: What one grammar may take: CPU time, memory beyond the vocabulary's, and time by the clock,
#: which on a busy machine is many times the CPU time.
MAX_WORK_SECONDS = 2.0
MAX_MEMORY_BYTES = 512 << 20
MAX_WAIT_SECONDS = 30.0

_MODULE = "tidemill_gpuworker.structured_output.trial_process"


class Vocabulary(NamedTuple):
    """The arguments of llguidance's tokenizer: tokenizer.json, number of logits, end tokens."""

    tokenizer: str
    n_vocab: int
    eos_token: list[int]


class GrammarTrial:
    """Compiles a grammar where it can be ended; used by several threads, one after another.

    llguidance's own limits leave out the automata of ``multipleOf`` and the expansion of a schema,
    and a thread cannot be stopped.  The process is started with the first grammar, and again if
    somebody ended it.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        work_seconds: float = MAX_WORK_SECONDS,
        memory_bytes: int = MAX_MEMORY_BYTES,
        wait_seconds: float = MAX_WAIT_SECONDS,
    ) -> None:
        self._vocabulary = vocabulary
        self._work_seconds = work_seconds
        self._memory_bytes = memory_bytes
        self._wait_seconds = wait_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Connection | None = None

    def complaint(self, grammar: str) -> str:
        """Return why this must not be compiled here, "" if it takes little enough.

        Whether it makes sense is for whoever compiles it to tell.
        """
        with self._lock:
            try:
                status = self._status_of(grammar.encode())
            except (EOFError, OSError):
                self._end()
                return "the process that compiles it has died"
        return self._told(status)

    def close(self) -> None:
        """End the process, and with it what it compiles."""
        process = self._process
        if process is not None:
            _kill(process)
        with self._lock:
            self._end()

    def _told(self, status: int | None) -> str:
        if status == 0:
            return ""
        if status is None:
            return f"it took more than {self._wait_seconds:g} s to compile"
        if status == -signal.SIGPROF:
            return f"it takes more than {self._work_seconds:g} s of work to compile"
        return f"it takes more than {self._memory_bytes >> 20} MiB of memory to compile"

    def _status_of(self, grammar: bytes) -> int | None:
        """Return the exit status of what compiled it, None if that takes too long."""
        link = self._link or self._start()
        link.send_bytes(grammar)
        if not link.poll(self._wait_seconds):
            self._end()
            return None
        return int(link.recv_bytes())

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        arguments = [str(theirs.fileno()), str(self._work_seconds), str(self._memory_bytes)]
        with theirs:
            # A session of its own: Ctrl-C is for the worker, whose end is the process's end.
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._link = ours
        ours.send_bytes(json.dumps(self._vocabulary._asdict()).encode())
        # The first answer says that it is ready, so that no grammar pays for the start.
        ours.recv_bytes()
        return ours

    def _end(self) -> None:
        process, link = self._process, self._link
        self._process = self._link = None
        if link is not None:
            link.close()
        if process is not None:
            _kill(process)
            process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        # Its fork too, which has no session of its own; one that outlives it ends by itself.
        os.killpg(process.pid, signal.SIGKILL)
