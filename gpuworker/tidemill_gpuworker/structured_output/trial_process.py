"""Compiles grammars, each in a fork: ``python -m ... FD WORK_SECONDS MEMORY_BYTES``.

``FD`` is a connection: it brings the vocabulary and then grammars, and takes for each of them the
exit status of the fork, negative if a signal ended it.
"""

import json
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from tidemill.service.grammar import limits


def main(arguments: list[str]) -> None:
    """Compile until the other end of the connection is closed."""
    link = Connection(int(arguments[0]))
    work_seconds, memory_bytes = float(arguments[1]), int(arguments[2])
    vocabulary = LLTokenizer(**json.loads(link.recv_bytes()))
    link.send_bytes(b"ready")
    while True:
        try:
            grammar = link.recv_bytes().decode()
        except EOFError:
            return
        link.send_bytes(str(_try(vocabulary, grammar, work_seconds, memory_bytes)).encode())


def _try(vocabulary: LLTokenizer, grammar: str, work_seconds: float, memory_bytes: int) -> int:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        _bound(work_seconds, memory_bytes)
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
    except MemoryError:
        os._exit(1)
    # Not the parent's way out: this is a copy of it.
    os._exit(0)


def _bound(work_seconds: float, memory_bytes: int) -> None:
    # SIGPROF and a failed allocation in llguidance end the process at once.
    signal.setitimer(signal.ITIMER_PROF, work_seconds)
    statm = Path("/proc/self/statm")
    if statm.exists():
        mapped = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes,) * 2)


if __name__ == "__main__":
    main(sys.argv[1:])
