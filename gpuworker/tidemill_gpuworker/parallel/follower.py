"""What a rank that follows does: the leader's orders, one after another."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tidemill.protocol.errors import EngineFailed, TidemillError
from tidemill_gpuworker.loading.loader import Checkpoint
from tidemill_gpuworker.loading.model_choice import LoadOptions, Part, choose_model
from tidemill_gpuworker.loading.model_config import ModelConfig
from tidemill_gpuworker.lora.layers import AdaptableLayers, HeldAdapter, LoadedAdapter
from tidemill_gpuworker.memory.block_copier import BlockCopier
from tidemill_gpuworker.memory.kv_cache import KVCache, check_fits, make_kv_cache
from tidemill_gpuworker.parallel import orders
from tidemill_gpuworker.parallel.channel import Channel
from tidemill_gpuworker.parallel.collectives import ProcessGroup
from tidemill_gpuworker.quantization.selection import choose_quantization
from tidemill_kernels import select_backend

_log = logging.getLogger(__name__)


class Follower:
    """Holds its part of the model and of the KV cache; ``join`` are the fields of that order.

    An order that cannot be carried out ends the process, and so the worker.
    """

    def __init__(self, channel: Channel, join: dict[str, Any]) -> None:
        self._channel = channel
        self._device = torch.device(join["device"])
        if join["num_threads"] is not None:
            torch.set_num_threads(join["num_threads"])
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._group = ProcessGroup(
            rank=join["rank"],
            tensor_size=join["tensor_size"],
            num_stages=join["num_stages"],
            device=self._device,
            store=join["store"],
            timeout_seconds=join["timeout_seconds"],
        )
        self._backend = select_backend(self._device)
        self._orders: dict[str, Callable[[dict[str, Any]], None]] = {
            orders.LOAD: self._answering(self._load),
            orders.CACHE: self._answering(self._make_cache),
            orders.COPY: lambda fields: self._copier.run(orders.unpack_copies(fields)),
            orders.ADAPTER: self._load_adapter,
            orders.ADAPT: self._adapt,
            orders.STEP: self._step,
            orders.LOGITS: self._logits,
        }
        channel.send(orders.DONE)

    @torch.inference_mode()
    def run(self) -> None:
        """Obey until the leader is gone, which ``Channel`` tells with ``EngineFailed``."""
        while True:
            name, fields = self._channel.receive()
            self._orders[name](fields)

    def _answering(
        self, obey: Callable[[dict[str, Any]], None]
    ) -> Callable[[dict[str, Any]], None]:
        def obey_and_answer(fields: dict[str, Any]) -> None:
            try:
                self._carry_out(obey, fields)
            except TidemillError as error:
                self._channel.send(orders.FAILED, {"error": error.one_line()})
                raise
            self._channel.send(orders.DONE)

        return obey_and_answer

    def _carry_out(self, obey: Callable[[dict[str, Any]], None], fields: dict[str, Any]) -> None:
        try:
            obey(fields)
        except torch.OutOfMemoryError as error:
            raise EngineFailed(
                f"{self._device} has no memory left: {error}",
                fix="Lower --gpu-memory-utilization, or let nobody else use its GPUs.",
            ) from error

    def _load(self, fields: dict[str, Any]) -> None:
        self._model = self._load_model(fields)

    def _load_model(self, fields: dict[str, Any]) -> Part:
        dtype: torch.dtype = getattr(torch, fields["dtype"])
        self._block_size: int = fields["block_size"]
        model_dir = Path(fields["model_dir"])
        source = choose_model(model_dir, fields["impl"])
        self._config: ModelConfig = source.split(self._group.place)
        self._dtype, self._adaptable = dtype, AdaptableLayers()
        self._arriving: dict[int, HeldAdapter] = {}
        self._adapters: dict[int, LoadedAdapter] = {}
        checkpoint = Checkpoint(
            model_dir,
            dtype=dtype,
            device=self._device,
            quantization=choose_quantization(model_dir, fields["quantization"]),
        )
        if fields["is_adaptable"]:
            checkpoint.wrap_linear = self._adaptable.wrap
        options = LoadOptions(
            dtype=dtype,
            device=self._device,
            backend=self._backend,
            block_size=self._block_size,
            max_model_len=fields["max_model_len"],
            num_positions=fields["num_positions"],
            place=self._group.place,
            ranks=self._group,
        )
        return source.load(checkpoint, options)

    def _make_cache(self, fields: dict[str, Any]) -> None:
        num_blocks: int = fields["num_blocks"]
        dtype: torch.dtype = getattr(torch, fields["dtype"])
        if self._device.type == "cuda":
            # The leader gave back what its profile took in the same way.
            torch.cuda.empty_cache()
        # Others may use this device more than the leader's, by which the cache was measured.
        check_fits(num_blocks, self._config, self._block_size, dtype, self._device)
        self._cache: KVCache = make_kv_cache(
            self._config,
            num_blocks=num_blocks,
            block_size=self._block_size,
            dtype=dtype,
            device=self._device,
        )
        self._copier = BlockCopier(self._cache, fields["num_slots"])

    def _load_adapter(self, fields: dict[str, Any]) -> None:
        key: int = fields["key"]
        empty = HeldAdapter(Path(fields["directory"]), fields["digest"], {})
        held = self._arriving.setdefault(key, empty)
        held.layers[fields["module"]] = orders.unpack_matrices(fields)
        if fields["is_last"]:
            weights = self._arriving.pop(key), self._dtype, self._device
            self._adapters[key] = self._adaptable.load(fields["name"], *weights)

    def _adapt(self, fields: dict[str, Any]) -> None:
        spans = {
            self._adapters[key]: [(start, end) for start, end in rows]
            for key, rows in fields["rows"]
        }
        self._adaptable.begin(spans, self._device)
        for key in fields["gone"]:
            del self._adapters[key]

    def _step(self, fields: dict[str, Any]) -> None:
        self._model(orders.unpack_inputs(fields, self._device), self._cache, self._backend)

    def _logits(self, fields: dict[str, Any]) -> None:
        dtype: torch.dtype = getattr(torch, fields["dtype"])
        hidden = torch.empty(fields["shape"], dtype=dtype, device=self._device)
        self._model.logits(self._group.share_rows(hidden))
