"""The weights of a Hugging Face directory: found, checked and copied where they belong."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tidemill.protocol.errors import DamagedModel, ModelNotFound, UnsafeModel
from tidemill_gpuworker.loading.safetensors_file import FLOAT_DTYPES, SafetensorsFile
from tidemill_gpuworker.models.linear import Linear
from tidemill_gpuworker.parallel.linear_part import LinearPart
from tidemill_gpuworker.parallel.shard import Section
from tidemill_gpuworker.quantization.on_the_fly import OnTheFly
from tidemill_gpuworker.quantization.scheme import QuantScheme

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Any training step moves the first row of every matrix, so its first page tells models apart.
_SAMPLE_BYTES = 4096
_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.")
# Old checkpoints hold the rotary frequencies, which are computed from the config; those with fp8
# the scales of an fp8 KV cache, which ours is not.
_UNUSED = (".rotary_emb.inv_freq", ".k_scale", ".v_scale")

Quantization = QuantScheme | OnTheFly

#: Takes layers that are one, or a part of them, and that one.
WrapLinear = Callable[[LinearPart, Linear], Linear]


@dataclass(slots=True)
class QuantizedSize:
    """Bytes of the quantised layers so far, and what they would take in the model's dtype."""

    num_bytes: int = 0
    num_plain_bytes: int = 0

    @property
    def num_saved(self) -> int:
        """Bytes less than plain weights would take."""
        return self.num_plain_bytes - self.num_bytes


class Checkpoint:
    """The safetensors files of a model directory, open for loading.

    ``dtype`` and ``device`` are those of the tensors handed out; ``quantization`` says which
    linear layers are stored, or to be kept, in fewer bits.

    Raises:
        ModelNotFound: the directory holds no weights.
        DamagedModel: a file is missing, truncated or inconsistent.
        UnsafeModel: the weights come as pickles only.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None = None,
    ) -> None:
        self._model_dir = model_dir
        self.dtype = dtype
        self.device = device
        self.quantization = quantization
        self.quantized = QuantizedSize()
        #: Given each linear layer that is loaded, returns what takes its place.
        self.wrap_linear: WrapLinear | None = None
        self._num_replaced = 0
        self._files = _open_files(model_dir)
        self._owners = {name: file for file in self._files for name in file.entries}
        self._taken: set[str] = set()

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in the form they are handed out in.

        That of quantised layers is known once they are loaded.
        """
        entries = (entry for file in self._files for entry in file.entries.values())
        counts = (math.prod(entry.shape) for entry in entries if entry.dtype in FLOAT_DTYPES)
        plain = sum(counts) - self._num_replaced
        return plain * self.dtype.itemsize + self.quantized.num_bytes

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Return a copy of one tensor; raises DamagedModel if it is missing or shaped otherwise."""
        return self.stacked([name], [shape[0]], *shape[1:])

    def stacked(self, names: Sequence[str], rows: Sequence[int], *rest: int) -> torch.Tensor:
        """Return tensors of [row count, *rest] on top of each other as one.

        Raises:
            DamagedModel: a tensor is missing or has another shape; names file and tensor.
            UnsupportedModel: a tensor is quantised.
        """
        for name, count in zip(names, rows, strict=True):
            self._check(name, (count, *rest))
        whole = torch.empty(sum(rows), *rest, dtype=self.dtype, device=self.device)
        for name, part in zip(names, whole.split_with_sizes(list(rows)), strict=True):
            self._owners[name].copy_into(name, part)
        self._taken.update(names)
        return whole

    def part(self, name: str, dim: int, sections: Sequence[Section], *rest: int) -> torch.Tensor:
        """Return parts of a tensor that is made of sections along ``dim``, one after another.

        ``rest`` are its other sizes.

        Raises:
            DamagedModel: it is missing or has another shape; names file and tensor.
            UnsupportedModel: it is quantised.
        """
        sizes = [section.size for section in sections]
        whole_size = sum(section.whole_size for section in sections)
        self._check(name, (*rest[:dim], whole_size, *rest[dim:]))
        part = torch.empty(
            (*rest[:dim], sum(sizes), *rest[dim:]), dtype=self.dtype, device=self.device
        )
        start = 0
        for section, target in zip(sections, part.split_with_sizes(sizes, dim), strict=True):
            self._owners[name].copy_part_into(name, target, dim, start + section.start)
            start += section.whole_size
        self._taken.add(name)
        self._num_replaced += math.prod(rest) * (whole_size - sum(sizes))
        return part

    def enter(self, prefix: str) -> None:
        """Leave all tensors but those whose names begin with ``prefix``, and drop it from them."""
        for file in self._files:
            file.enter(prefix)
        self._owners = {name: file for file in self._files for name in file.entries}

    def skip(self, names: Iterable[str]) -> None:
        """Leave tensors to those that hold other parts of the model."""
        for name in set(names) - self._taken:
            entry = self._owner(name).entries[name]
            self._num_replaced += math.prod(entry.shape) * (entry.dtype in FLOAT_DTYPES)
            self._taken.add(name)

    def leave(self, num_weights: int) -> None:
        """Leave so many numbers, of whatever tensors, to those that hold other parts."""
        self._num_replaced += num_weights

    def skip_layers(self, layers: Container[int]) -> None:
        """Leave these layers to others."""
        found = {name: _LAYER_TENSOR.match(name) for name in self._owners}
        self.skip(name for name, m in found.items() if m and int(m[1]) in layers)

    def stored_dtype(self, name: str) -> str | None:
        """Return the name that the file gives a tensor's dtype, None if there is no tensor."""
        file = self._owners.get(name)
        return None if file is None else file.entries[name].dtype

    def stored(self, name: str, *shape: int) -> torch.Tensor:
        """Return a copy of a tensor as it is stored, on the CPU.

        Raises:
            DamagedModel: it is missing or has another shape; names file and tensor.
            UnsupportedModel: its dtype is not known.
        """
        self._check(name, shape)
        return self.stored_any_shape(name)

    def stored_any_shape(self, name: str) -> torch.Tensor:
        """Return a copy as ``stored`` does, of whatever shape."""
        file = self._owner(name)
        tensor = file.read(name)
        if name not in self._taken and file.entries[name].dtype in FLOAT_DTYPES:
            self._num_replaced += tensor.numel()
        self._taken.add(name)
        return tensor

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._owners

    def are_equal(self, first: str, second: str) -> bool:
        """Whether two tensors would be handed out alike.

        Raises UnsupportedModel if one is quantised.
        """
        files = {name: self._owner(name) for name in (first, second)}
        if files[first].entries[first].shape != files[second].entries[second].shape:
            return False
        blocks = (file.blocks(name, self.dtype) for name, file in files.items())
        return all(torch.equal(one, other) for one, other in zip(*blocks, strict=True))

    def take_zeros(self, name: str) -> None:
        """Take a tensor that changes nothing, being zero; leave another where it is."""
        if not self._owner(name).read(name).any():
            self._taken.add(name)

    def count_quantized(self, num_weights: int, num_bytes: int, *, was_plain: bool) -> None:
        """Keep account of a quantised layer that takes ``num_bytes``.

        ``was_plain`` says that it was stored as plain floats.
        """
        self._num_replaced += num_weights * was_plain
        self.quantized.num_bytes += num_bytes
        self.quantized.num_plain_bytes += num_weights * self.dtype.itemsize

    def check_layers_taken(self) -> None:
        """Raise DamagedModel if a layer holds a tensor that nobody took.

        Such a tensor belongs to a layer, a bias or a norm that config.json does not tell of, and a
        model without it computes nonsense.  Outside the layers there may be more than is needed,
        such as the output head of a model that uses its embedding instead.
        """
        left = self._owners.keys() - self._taken
        layers = {name: int(found[1]) for name in left if (found := _LAYER_TENSOR.match(name))}
        strange = [name for name in layers if not name.endswith(_UNUSED)]
        if strange:
            first = min(strange, key=lambda name: (layers[name], name))
            raise DamagedModel(
                f"{self._owners[first].path}: tensor {first} has no place in the model that"
                f" {self._model_dir / 'config.json'} describes",
                fix=_FIX,
            )

    def revision(self) -> str:
        """Return a digest of the model: sha256 hex over config.json and, file by file, the header
        and the first 4 KiB of every tensor.

        That reads megabytes where the whole would be gigabytes; weights that differ only beyond
        those pages share a digest.
        """
        digest = hashlib.sha256((self._model_dir / "config.json").read_bytes())
        for file in self._files:
            digest.update(file.header)
            for name in sorted(file.entries):
                digest.update(file.sample(name, _SAMPLE_BYTES))
        return digest.hexdigest()

    def _owner(self, name: str) -> SafetensorsFile:
        file = self._owners.get(name)
        if file is None:
            where = ", ".join(str(file.path) for file in self._files)
            raise DamagedModel(f"tensor {name} is missing from {where}", fix=_FIX)
        return file

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        file = self._owner(name)
        found = file.entries[name].shape
        if found != shape:
            raise DamagedModel(
                f"{file.path}: tensor {name} is {list(found)}, config.json makes it {list(shape)}",
                fix=_FIX,
            )


_FIX = "Download the model again; config.json and weights must be of the same model."


def _open_files(model_dir: Path) -> list[SafetensorsFile]:
    index = model_dir / _INDEX
    if (model_dir / _SINGLE).is_file():
        return [SafetensorsFile(model_dir / _SINGLE)]
    if index.is_file():
        return _open_shards(index)
    pickles = sorted(path.name for pattern in _PICKLES for path in model_dir.glob(pattern))
    if pickles:
        raise UnsafeModel(
            f"{model_dir} holds pickle weights ({pickles[0]}), which can run code when loaded",
            fix="Use the safetensors files of the model, or convert it with save_pretrained.",
        )
    raise ModelNotFound(f"{model_dir} holds no {_SINGLE}", fix="Download the weights as well.")


def _open_shards(index: Path) -> list[SafetensorsFile]:
    weight_map = _read_weight_map(index)
    files = {}
    for shard in sorted(set(weight_map.values())):
        files[shard] = SafetensorsFile(index.parent / shard)
    for name, shard in weight_map.items():
        if name not in files[shard].entries:
            raise DamagedModel(f"{index.parent / shard}: tensor {name} is missing", fix=_FIX)
    return list(files.values())


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        pairs = {str(name): str(shard) for name, shard in weight_map.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedModel(f"{index} is not a safetensors index: {error}", fix=_FIX) from error
    # A shard is a plain file name; anything else could read outside the model directory.
    strange = [shard for shard in pairs.values() if Path(shard).name != shard]
    if strange or not pairs:
        raise DamagedModel(f"{index} names no shard files or strange ones {strange}", fix=_FIX)
    return pairs
