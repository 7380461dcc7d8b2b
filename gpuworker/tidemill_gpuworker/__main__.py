"""The worker process: ``python -m tidemill_gpuworker --model MODEL``."""

import os

# Before torch is imported: idle OpenMP threads that spin starve the other processes of a machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from prometheus_client import REGISTRY, CollectorRegistry

from tidemill.protocol.calls import RetryPause
from tidemill.protocol.errors import ConfigError, ModelError, TidemillError
from tidemill.service.config import load_config
from tidemill.service.log import setup_logging
from tidemill.service.metrics import MetricsServer
from tidemill.service.redis import check_server, connect
from tidemill.service.runtime import Drain, exit_with_parent
from tidemill.service.step_log import StepLog
from tidemill_gpuworker.demo.demo_interrupt import one_interrupt
from tidemill_gpuworker.demo.demo_progress import TerminalReport
from tidemill_gpuworker.engine.served_model import ServedModel
from tidemill_gpuworker.loading.model_finder import find_model_dir
from tidemill_gpuworker.options.command_line import parse_config
from tidemill_gpuworker.options.worker_config import WorkerConfig
from tidemill_gpuworker.shell.vllm_metrics import VllmMetrics
from tidemill_gpuworker.shell.worker_process import ProcessConfig, WorkerProcess

_log = logging.getLogger("tidemill_gpuworker")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve a model until drained; returns the exit status.

    0 drained, 1 an error that may pass, 2 wrong settings or a model that cannot be served. A step
    that hangs ends the process with ``heartbeat.HUNG_STATUS``.
    """
    exit_with_parent()
    try:
        service = load_config()
        setup_logging(service.log_level, "worker")
        config = parse_config(sys.argv[1:] if arguments is None else arguments, service)
        return 0 if _serve(config) else 1
    except KeyboardInterrupt:
        # While the model loads there is nothing to drain.
        return 130
    except TidemillError as error:
        # ``tidemill up`` tells its user the line that begins like this.
        print(f"error: {error.one_line()}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | ModelError) else 1


def _serve(config: WorkerConfig) -> bool:
    with connect(config.redis_url, shard=config.service.shard) as client:
        # A model takes long to load; a wrong address need not.
        check_server(client)
    # Imported here: torch takes seconds, which a wrong flag or --help need not wait for.
    from tidemill_gpuworker.loading.task_setup import load_served_model

    config = _with_model(config)
    with contextlib.ExitStack() as open_files:
        steps = open_files.enter_context(StepLog(config.step_log)) if config.step_log else None
        model = load_served_model(config, *([steps.write] if steps else []))
        if model.ranks is not None:
            open_files.callback(model.ranks.close)
        process = WorkerProcess(model, process_config(config))
        with Drain() as drain, _metrics_endpoint(config, process, model):
            done = process.run(drain, on_ready=lambda: _announce(config, model))
    _log.info("worker %s has left", model.info.worker_id)
    return done


def _with_model(config: WorkerConfig) -> WorkerConfig:
    # An interrupt ends a conversion with all that it has begun.
    with one_interrupt(), TerminalReport() as report:
        found = find_model_dir(config.model, config.service.cache_dir, report)
    return replace(config, model_dir=found)


def process_config(config: WorkerConfig) -> ProcessConfig:
    """Pick what the worker shell needs; its engine takes the rest."""
    return ProcessConfig(
        redis_url=config.redis_url,
        shard=config.service.shard,
        lease_seconds=config.service.lease_seconds,
        beat_seconds=config.service.beat_seconds,
        max_step_seconds=config.max_step_seconds,
        drain_seconds=config.drain_seconds,
        retry=RetryPause(
            base_ms=round(config.retry_seconds * 1000),
            cap_ms=round(config.max_retry_seconds * 1000),
        ),
    )


@contextlib.contextmanager
def _metrics_endpoint(
    config: WorkerConfig, process: WorkerProcess, model: ServedModel
) -> Iterator[None]:
    if config.metrics_port is None:
        yield
        return
    registries = [REGISTRY]
    if config.vllm_metrics:
        registries.append(CollectorRegistry())
        registries[1].register(VllmMetrics(model.info.model))
    with MetricsServer(
        config.metrics_port, health=lambda: (process.is_healthy, {}), registries=registries
    ) as server:
        _log.info("metrics on port %d", server.port)
        yield


def _announce(config: WorkerConfig, model: ServedModel) -> None:
    info, has_blocks = model.info, model.kinds is None
    _log.info(
        "ready: %s serves %s (%s)%s",
        info.worker_id,
        info.model,
        model.card.task,
        f" with {info.num_blocks} KV blocks of {info.block_size} tokens" if has_blocks else "",
    )
    if config.ready_fd is not None:
        os.write(config.ready_fd, f"{info.worker_id}\n".encode())
        os.close(config.ready_fd)


if __name__ == "__main__":
    sys.exit(main())
