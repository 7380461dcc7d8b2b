"""A whole Tidemill around a small model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tidemill.cli.gateway_options import GatewayOptions
from tidemill.cli.stack import Stack, StackOptions
from tidemill.cli.up import echo, thread_environment

LEASES = (("TIDEMILL_LEASE_SECONDS", "5"), ("TIDEMILL_BEAT_SECONDS", "1"))


@contextmanager
def small_stack(
    model_dir: Path,
    data_dir: Path,
    *worker_args: str,
    name: str = "m",
    num_workers: int = 1,
    gateway: GatewayOptions | None = None,
    scheduler_args: tuple[str, ...] = (),
    sink: Callable[[str], None] = echo,
) -> Iterator[Stack]:
    """Run broker, scheduler and workers of one model on the CPU in float32, and a gateway."""
    options = StackOptions(
        redis_url=None,
        data_dir=data_dir,
        fsync="no",
        num_workers=num_workers,
        worker_args=(
            *("--model", str(model_dir), "--served-model-name", name),
            *("--device", "cpu", "--dtype", "float32", *worker_args),
        ),
        gateway=gateway,
        scheduler_args=scheduler_args,
        environment=(*LEASES, *thread_environment(num_workers, None)),
    )
    with Stack(options, sink=sink) as running:
        yield running
