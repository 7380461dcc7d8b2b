"""Starts the ranks of a model as processes, leads them, and ends them."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch

from tidemill.protocol.errors import EngineFailed
from tidemill_gpuworker.engine.inputs import StepInputs
from tidemill_gpuworker.lora.layers import HeldAdapter, LoadedAdapter, Spans
from tidemill_gpuworker.memory.block_copies import BlockCopies
from tidemill_gpuworker.parallel import orders
from tidemill_gpuworker.parallel.channel import Channel
from tidemill_gpuworker.parallel.collectives import NO_COLLECTIVES, Collectives, ProcessGroup
from tidemill_gpuworker.parallel.followers import LoadOrder
from tidemill_gpuworker.parallel.shard import Place, place_of

_log = logging.getLogger(__name__)

_END_SECONDS = 5.0
_FIX = "Start the worker again; look at the log of the rank, and at its device."


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    channel: Channel


class Team:
    """The ranks of one model at a time, on one machine; this process is rank 0.

    They are started by the first ``load``, which must be called by the main thread: on Linux they
    die with the thread that started them, and everywhere with the channel to it.

    Args:
        tensor_size: parts of each layer.
        num_stages: parts of the sequence of layers.
        device: "cpu", or "cuda" for one GPU per rank, from the first on.
        timeout_seconds: how long a rank may let the others wait within a step.
        num_threads: CPU threads of each rank; None leaves what torch takes.
    """

    def __init__(
        self,
        tensor_size: int,
        num_stages: int = 1,
        *,
        device: str = "cpu",
        timeout_seconds: float = 60.0,
        num_threads: int | None = None,
    ) -> None:
        self._tensor_size, self._num_stages = tensor_size, num_stages
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._num_threads = num_threads
        self._ranks: list[_Rank] = []
        self._group: ProcessGroup | None = None
        self._lost: EngineFailed | None = None
        self._is_closing = False
        self._on_lost: Callable[[Exception], None] = lambda error: None
        #: Rows that adapters change, as the ranks were told last, and adapters that nobody holds.
        self._adapted: list[list[object]] = []
        self._gone: deque[int] = deque()
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    @property
    def size(self) -> int:
        """Ranks, this process among them."""
        return self._tensor_size * self._num_stages

    @property
    def place(self) -> Place:
        """The part of this process."""
        return place_of(0, self._tensor_size, self._num_stages)

    @property
    def collectives(self) -> Collectives:
        """What the ranks compute together."""
        return self._group or NO_COLLECTIVES

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the other ranks."""
        return tuple(rank.process.pid for rank in self._ranks)

    def watch(self, on_lost: Callable[[Exception], None]) -> None:
        """Be told, on another thread, once a rank has ended by itself."""
        self._on_lost = on_lost
        if self._lost is not None:
            on_lost(self._lost)

    def load(self, order: LoadOrder) -> None:
        """Let each rank load its part, while this process loads its own."""
        if not self._ranks and self.size > 1:
            self._start()
        # Those of the model before are gone with it.
        self._adapted, self._gone = [], deque()
        self._order(orders.LOAD, {**asdict(order), "model_dir": str(order.model_dir)})

    def confirm(self) -> None:
        """Wait until the last order is carried out; raises ``EngineFailed`` if one cannot do it."""
        for rank in self._ranks:
            answer, fields = rank.channel.receive()
            if answer != orders.DONE:
                raise EngineFailed(f"rank {rank.number}: {fields.get('error')}", fix=_FIX)

    def make_cache(self, num_blocks: int, num_slots: int, dtype: torch.dtype) -> None:
        """Let each rank make a KV pool and a CPU tier."""
        sizes = {"num_blocks": num_blocks, "num_slots": num_slots}
        self._order(orders.CACHE, {**sizes, "dtype": orders.name_of(dtype)})
        self.confirm()

    def copy(self, copies: BlockCopies) -> None:
        """Let the ranks copy blocks."""
        self._order(orders.COPY, orders.pack_copies(copies))

    def load_adapter(self, adapter: LoadedAdapter, held: HeldAdapter) -> None:
        """Let each rank load its part of an adapter, and drop it once the leader's is gone."""
        for fields in orders.pack_adapter(adapter, held):
            self._order(orders.ADAPTER, fields)
        weakref.finalize(adapter, self._gone.append, adapter.key).atexit = False

    def adapt(self, spans: Spans) -> None:
        """Let adapters change these rows of the ranks' next step."""
        rows = [[adapter.key, [list(span) for span in each]] for adapter, each in spans.items()]
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        if gone or rows != self._adapted:
            self._order(orders.ADAPT, {"rows": rows, "gone": gone})
            self._adapted = rows

    def begin_step(self, inputs: StepInputs) -> None:
        """Let the ranks run a step."""
        self._order(orders.STEP, orders.pack_inputs(inputs))

    def begin_logits(self, hidden: torch.Tensor) -> None:
        """Let the ranks of the first stage take part in the logits of these rows."""
        first_stage = self._ranks[: self._tensor_size - 1]
        fields = {"shape": [*hidden.shape], "dtype": orders.name_of(hidden.dtype)}
        self._order(orders.LOGITS, {**fields}, first_stage)

    def check(self) -> None:
        """Raise ``EngineFailed`` if a rank is gone, or a step was left unfinished."""
        if self._lost is not None:
            raise self._lost

    def failed(self, error: Exception) -> Exception:
        """Note that a step was left unfinished: the ranks wait in the middle of it."""
        self._lost = self._lost or EngineFailed(
            f"the work of {self.size} ranks failed: {type(error).__name__}: {error}", fix=_FIX
        )
        return self._lost

    def close(self) -> None:
        """End the ranks; after this no process of the team is left."""
        self._is_closing = True
        for rank in self._ranks:
            rank.channel.close()
        for rank in self._ranks:
            try:
                # One that waits in the middle of a step does not see the end of its channel.
                rank.process.wait(0.0 if self._lost else _END_SECONDS)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._directory is not None:
            self._directory.cleanup()
        self._ranks = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="tidemill-ranks-")
        store = str(Path(self._directory.name, "store"))
        _stay_on_this_machine()
        self._ranks = [self._spawn(number) for number in range(1, self.size)]
        for rank in self._ranks:
            rank.channel.send(orders.JOIN, self._join(rank.number, store))
            thread = threading.Thread(target=self._watch, args=(rank,), daemon=True)
            thread.start()
        # Until they have loaded their libraries; what follows has a time limit.
        self.confirm()
        try:
            self._group = self._join_group(store)
        except RuntimeError as error:
            raise self.failed(error) from error
        self.confirm()

    def _join_group(self, store: str) -> ProcessGroup:
        return ProcessGroup(
            rank=0,
            tensor_size=self._tensor_size,
            num_stages=self._num_stages,
            device=torch.device(device_of(self._device, 0)),
            store=store,
            timeout_seconds=self._timeout_seconds,
        )

    def _spawn(self, number: int) -> _Rank:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "tidemill_gpuworker.parallel.rank", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        channel = Channel(ours, f"rank {number}", send_seconds=self._timeout_seconds)
        return _Rank(number, process, channel)

    def _join(self, number: int, store: str) -> dict[str, object]:
        return {
            "rank": number,
            "tensor_size": self._tensor_size,
            "num_stages": self._num_stages,
            "device": device_of(self._device, number),
            "store": store,
            "timeout_seconds": self._timeout_seconds,
            "num_threads": self._num_threads,
            "parent": os.getpid(),
        }

    def _order(
        self, name: str, fields: dict[str, object], ranks: list[_Rank] | None = None
    ) -> None:
        self.check()
        try:
            for rank in self._ranks if ranks is None else ranks:
                rank.channel.send(name, fields)
        except EngineFailed as error:
            raise self.failed(error) from error

    def _watch(self, rank: _Rank) -> None:
        status = rank.process.wait()
        if not self._is_closing:
            _log.error("rank %d (process %d) ended: %d", rank.number, rank.process.pid, status)
            self._lost = EngineFailed(f"rank {rank.number} ended with status {status}", fix=_FIX)
            self._on_lost(self._lost)
            if self._group is not None:
                self._group.abort()


def device_of(name: str, rank: int) -> str:
    """Return the device of a rank: the CPU, or the GPU of the same number."""
    return f"cuda:{rank}" if name == "cuda" else name


def _stay_on_this_machine() -> None:
    # Otherwise gloo listens where the name of the host points to, if it points anywhere, and NCCL
    # on the first card.  The ranks inherit it.
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            socket.if_nametoindex("lo")
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
