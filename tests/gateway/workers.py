"""Further workers beside that of the site, within the process of the tests."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tidemill.service.config import load_config
from tidemill.service.runtime import Drain
from tidemill_gpuworker.__main__ import process_config
from tidemill_gpuworker.loading.task_setup import load_served_model
from tidemill_gpuworker.options.command_line import parse_config
from tidemill_gpuworker.shell.worker_process import WorkerProcess


@contextmanager
def worker(
    url: str, model_dir: Path, name: str, *, environ: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Serve a model on the CPU until the context is left; it starts in tenths of a second."""
    arguments = ["--model", str(model_dir), "--served-model-name", name, "--redis-url", url]
    service = load_config({**os.environ, **(environ or {})})
    config = parse_config([*arguments, "--device", "cpu", "--dtype", "float32"], service)
    process = WorkerProcess(load_served_model(config), process_config(config))
    drain, is_ready = Drain(), threading.Event()
    thread = threading.Thread(target=process.run, args=(drain, is_ready.set), name=name)
    thread.start()
    try:
        assert is_ready.wait(30), "the worker did not start"
        yield
    finally:
        drain.request()
        thread.join(30)
    assert not thread.is_alive(), "the worker did not leave"
