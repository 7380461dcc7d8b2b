"""What the ranks of a model exchange while they compute."""

import threading
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from tidemill_gpuworker.parallel.shard import Place, place_of


class Collectives(Protocol):
    """The other ranks, as the model sees them."""

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x`` over the ranks of this stage, in place."""
        ...

    def receive_hidden(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the stage before computed, in place of ``x``."""
        ...

    def pass_on(self, x: torch.Tensor) -> torch.Tensor:
        """Hand the hidden states to the next stage.

        Returns, on the first stage, those that come out of the last one.
        """
        ...

    def share_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return the leader's ``x`` on all ranks of its stage, in place."""
        ...

    def put_together(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, features of all] on the leader for a part of the features on each rank."""
        ...

    def gather_features(self, x: torch.Tensor) -> torch.Tensor:
        """Return what ``put_together`` does, on all ranks of this stage."""
        ...


class NoCollectives:
    """A model in one process."""

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``."""
        return x

    def receive_hidden(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``."""
        return x

    def pass_on(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``."""
        return x

    def share_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``."""
        return x

    def put_together(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``."""
        return x

    def gather_features(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``."""
        return x


NO_COLLECTIVES = NoCollectives()


def backend_of(device: torch.device) -> str:
    """Return what ``torch.distributed`` calls the library that moves tensors of ``device``."""
    return "nccl" if device.type == "cuda" else "gloo"


class ProcessGroup:
    """The ranks over ``torch.distributed``: NCCL between GPUs, gloo between CPUs.

    What is exchanged lies on ``device``, which is this rank's own; what ranks are told goes over
    their ``Channel``.  One group at a time in a process.  ``store`` is a file that all ranks can
    open.  If a rank is not heard of for ``timeout_seconds`` within a step, the others raise
    RuntimeError, or with NCCL, which nobody can wait for in Python, end their processes.
    """

    def __init__(
        self,
        *,
        rank: int,
        tensor_size: int,
        num_stages: int,
        device: torch.device,
        store: str,
        timeout_seconds: float,
    ) -> None:
        self.place: Place = place_of(rank, tensor_size, num_stages)
        self._rank, self._world = rank, tensor_size * num_stages
        self._leader_of_stage = rank - self.place.tensor.index
        self._backend = backend_of(device)
        self._lock, self._is_open = threading.Lock(), True
        timeout = timedelta(seconds=timeout_seconds)
        dist.init_process_group(
            self._backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=self._world,
            timeout=timeout,
            # So that NCCL connects the ranks now, and failures are not met by the first step.
            device_id=device if self._backend == "nccl" else None,
        )
        # All ranks must take part in making every group.
        groups = [
            # A group of its own would wait for half an hour.
            dist.new_group(list(range(first, first + tensor_size)), timeout=timeout)
            for first in range(0, self._world, tensor_size)
        ]
        self._stage = groups[self.place.stage.index]

    def close(self) -> None:
        """Leave the group, once the other ranks have left."""
        if self._backend == "nccl":
            # It would wait for the others to take part in its end.
            self.abort()
        elif self._leave():
            dist.destroy_process_group()

    def abort(self) -> None:
        """End what the device waits for from a rank that is gone; any thread may.

        What it computes after that means nothing.  gloo sees for itself that a rank is gone.
        """
        if self._backend == "nccl" and self._leave():
            dist.distributed_c10d._abort_process_group()

    def _leave(self) -> bool:
        with self._lock:
            was_open, self._is_open = self._is_open, False
        return was_open

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x`` over the ranks of this stage, in place."""
        if not self.place.tensor.is_whole:
            x = x.contiguous()
            dist.all_reduce(x, group=self._stage)
        return x

    def receive_hidden(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the stage before computed, in place of ``x``."""
        dist.recv(x, (self._rank - self.place.tensor.count) % self._world)
        return x

    def pass_on(self, x: torch.Tensor) -> torch.Tensor:
        """Hand the hidden states to the next stage; the first gets those of the last."""
        stage = self.place.stage
        if not stage.is_whole:
            dist.send(x.contiguous(), (self._rank + self.place.tensor.count) % self._world)
            return x if stage.index else self.receive_hidden(torch.empty_like(x))
        return x

    def share_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return the leader's ``x`` on all ranks of its stage, in place."""
        x = x.contiguous()
        dist.broadcast(x, self._leader_of_stage, group=self._stage)
        return x

    def put_together(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, features of all] on the leader for a part of the features on each rank."""
        x = x.contiguous()
        leads = not self.place.tensor.index
        parts = [torch.empty_like(x) for _ in range(self.place.tensor.count)] if leads else None
        dist.gather(x, parts, self._leader_of_stage, group=self._stage)
        return x if parts is None else torch.cat(parts, dim=-1)

    def gather_features(self, x: torch.Tensor) -> torch.Tensor:
        """Return what ``put_together`` does, on all ranks of this stage."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.place.tensor.count)]
        dist.all_gather(parts, x, group=self._stage)
        return torch.cat(parts, dim=-1)
