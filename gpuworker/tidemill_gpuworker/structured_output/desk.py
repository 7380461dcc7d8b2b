"""Jobs whose grammars are not compiled yet."""

from collections.abc import Callable

from tidemill.protocol.errors import InvalidRequest
from tidemill.protocol.structured import StructuredOutput
from tidemill_gpuworker.structured_output.compiler import Compilation, GrammarCompiler


class GrammarDesk:
    """Keeps jobs out of the engine until their grammars are compiled.

    ``wake`` is called, on any thread, when a job may have become ready.  Without a compiler every
    job with a constraint is refused.
    """

    def __init__(
        self, compiler: GrammarCompiler | None, wake: Callable[[], None] = lambda: None
    ) -> None:
        self._compiler = compiler
        self._wake = wake
        self._waiting: dict[str, Compilation] = {}
        # Jobs that share their grammar with nobody.
        self._alone: set[str] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_settled(self) -> bool:
        """Whether ``take_settled`` would return a job."""
        return any(compilation.is_settled for compilation in self._waiting.values())

    def compile(self, job_id: str, structured: StructuredOutput) -> Compilation:
        """Return the job's grammar; until it is settled the job waits here.

        Raises ``InvalidRequest`` if this worker compiles none.
        """
        if self._compiler is None:
            raise InvalidRequest(
                "structured: this worker cannot enforce the form of an answer",
                field="structured",
                fix="Use a model with a byte-level tokenizer; the worker's log names the reason.",
            )
        return self._wait_for(job_id, self._compiler.compile(structured))

    def compile_alone(self, job_id: str, spent: Compilation) -> Compilation | None:
        """Return a grammar of the job's own once the shared one has become too complex.

        Perhaps others made it so.  None if the job had one of its own already.
        """
        if self._compiler is None or job_id in self._alone:
            return None
        self._alone.add(job_id)
        return self._wait_for(job_id, self._compiler.compile_again(spent))

    def _wait_for(self, job_id: str, compilation: Compilation) -> Compilation:
        if not compilation.is_settled:
            self._waiting[job_id] = compilation
            compilation.future.add_done_callback(lambda _: self._wake())
        return compilation

    def discard(self, job_id: str) -> None:
        """Forget a job; its grammar is compiled all the same."""
        self._waiting.pop(job_id, None)
        self._alone.discard(job_id)

    def take_settled(self) -> list[str]:
        """Remove and return the jobs whose grammars are compiled, refused or overdue."""
        settled = [job_id for job_id, each in self._waiting.items() if each.is_settled]
        for job_id in settled:
            del self._waiting[job_id]
        return settled
