"""A loaded model, ready to run."""

from dataclasses import dataclass

from tidemill.protocol.messages import ModelCard, WorkerInfo
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.kind_work import JobEngine, KindWork
from tidemill_gpuworker.structured_output.compiler import GrammarCompiler


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The engine that runs the model, and what the other processes must know of it.

    ``kinds`` brings jobs of another kind than *generate* into the engine; it is missing where the
    model generates.
    """

    engine: JobEngine
    tokenizer: Tokenizer
    card: ModelCard
    info: WorkerInfo
    grammars: GrammarCompiler | None = None
    kinds: KindWork | None = None
