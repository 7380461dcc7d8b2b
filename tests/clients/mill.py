"""A live Tidemill with real models, for clients to talk to."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gateway.conftest import free_port
from gateway.workers import worker
from support.model_wheels import MINILM, WHISPER_TINY
from support.small_stacks import small_stack
from tidemill.cli.gateway_options import GatewayOptions
from tidemill.cli.stack import Stack
from tidemill_gpuworker.demo.demo_model import MODEL_NAME
from tidemill_gpuworker.speech.ctranslate2 import convert

#: Of a benchmark with several requests at once, each as long as the demo model can take.
KV_CACHE_BYTES = 1 << 30
#: Where answers end that a client does not limit and the small model does not end.
MAX_MODEL_LEN = 2048


@dataclass(frozen=True)
class Mill:
    """Addresses and names; workers of the other models start when their name is first asked for.

    ``tokenizer_dir`` is the directory of the demo model, which holds its tokenizer.
    """

    root: str
    model: str
    tokenizer_dir: Path
    data_dir: Path
    scratch: Path
    stack: Stack
    workers: ExitStack

    @property
    def url(self) -> str:
        """What a client of OpenAI takes as its ``base_url``."""
        return f"{self.root}/v1"

    @cached_property
    def embedding_model(self) -> str:
        """MiniLM, which makes vectors and scores."""
        return self._serve(MINILM.directory(), "minilm")

    @cached_property
    def speech_model(self) -> str:
        """Whisper's smallest, which understands English."""
        directory = self.scratch / "whisper"
        convert(WHISPER_TINY.directory(), directory)
        return self._serve(directory, "whisper")

    def _serve(self, directory: Path, name: str) -> str:
        environ = {"TIDEMILL_DATA_DIR": str(self.data_dir)}
        self.workers.enter_context(worker(self.stack.url, directory, name, environ=environ))
        return name


@contextmanager
def running_mill(model_dir: Path, scratch: Path) -> Iterator[Mill]:
    """Run broker, scheduler, a worker of the demo model, and a gateway on a free port."""
    port, data_dir = free_port(), scratch / "data"
    stack = small_stack(
        model_dir,
        data_dir,
        *("--max-num-seqs", "16", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
        *("--max-model-len", str(MAX_MODEL_LEN)),
        # Clients that do not say how to sample get the same answers in every run.
        *("--override-generation-config", '{"top_k": 1}'),
        name=MODEL_NAME,
        gateway=GatewayOptions(port=port),
        # The receivers of the tests are on this machine.
        scheduler_args=("--allow-private-webhooks",),
    )
    with stack as running, ExitStack() as workers:
        root = f"http://127.0.0.1:{port}"
        yield Mill(root, MODEL_NAME, model_dir, data_dir, scratch, running, workers)


def client_environment(**changes: str | None) -> dict[str, str]:
    """What a user's shell has, without what is ours; None takes a variable away."""
    ours = ("OPENAI_", "TIDEMILL_", "PYTEST_", "PYTHON", "HF_HUB_OFFLINE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    changed = {**kept, **changes}
    return {name: value for name, value in changed.items() if value is not None}
