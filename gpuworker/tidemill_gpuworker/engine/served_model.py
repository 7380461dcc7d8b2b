"""A loaded model, ready to run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tidemill.protocol.messages import ModelCard, WorkerInfo
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.engine.job_engine import JobEngine
from tidemill_gpuworker.engine.kind_work import KindWork
from tidemill_gpuworker.structured_output.compiler import GrammarCompiler


class Ranks(Protocol):
    """The processes that hold other parts of the model."""

    def watch(self, on_lost: Callable[[Exception], None]) -> None:
        """Tell, on another thread, once one of them has ended by itself."""
        ...

    def close(self) -> None:
        """End them."""
        ...


if TYPE_CHECKING:
    # It loads torch, which is slow and not needed by what decides which sequences run.
    from tidemill_gpuworker.lora.adapters import Adapters


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The engine that runs the model, and what the other processes must know of it.

    ``kinds`` brings jobs of another kind than *generate* into the engine; it is missing where the
    model generates.  ``ranks`` are to be closed once the engine is not used any more.
    """

    engine: JobEngine
    tokenizer: Tokenizer
    card: ModelCard
    info: WorkerInfo
    grammars: GrammarCompiler | None = None
    kinds: KindWork | None = None
    adapters: "Adapters | None" = None
    ranks: Ranks | None = None
