"""A loaded model, ready to run."""

from dataclasses import dataclass

from tidemill.protocol.messages import ModelCard, WorkerInfo
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.engine import Engine
from tidemill_gpuworker.structured_output.compiler import GrammarCompiler


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The engine that runs the model, and what the other processes must know of it."""

    engine: Engine
    tokenizer: Tokenizer
    card: ModelCard
    info: WorkerInfo
    grammars: GrammarCompiler | None = None
