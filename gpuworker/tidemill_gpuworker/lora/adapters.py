"""The adapters that a worker can serve: found on disk, loaded when a job wants them."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tidemill.protocol.errors import ModelError, UnknownAdapter, UnsupportedModel
from tidemill.protocol.messages import MAX_ADAPTERS, AdapterCard
from tidemill.protocol.values import ShortName
from tidemill_gpuworker.lora.adapter_files import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    AdapterFiles,
    read_adapter,
)
from tidemill_gpuworker.lora.config import LoraConfig
from tidemill_gpuworker.lora.layers import LoadedAdapter

_log = logging.getLogger(__name__)

_NAME: TypeAdapter[str] = TypeAdapter(ShortName)

#: Changes when one of the files does.
_Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Found:
    path: Path
    stamp: _Stamp
    digest: str
    rank: int


class Adapters:
    """Finds and loads adapters; any thread may ask.

    ``load`` brings the weights of one to the device, ``check`` only sees whether it could.  What
    leaves the ``max_loras`` loaded ones stays with the sequences that use it until they end.
    """

    def __init__(
        self,
        config: LoraConfig,
        load: Callable[[str, AdapterFiles], LoadedAdapter],
        check: Callable[[str, AdapterFiles], object] | None = None,
    ) -> None:
        """Read all adapters there are; raises ``ModelError`` for one of ``modules``."""
        self._config = config
        self._load = load
        self._check = check or load
        self._lock = threading.Lock()
        self._loaded: OrderedDict[str, LoadedAdapter] = OrderedDict()
        self._refused: dict[str, _Stamp] = {}
        self._fixed = {name: self._checked(name, path) for name, path in config.modules}
        self._found = dict(self._fixed)
        self.rescan()

    @property
    def cards(self) -> tuple[AdapterCard, ...]:
        """What producers are told of the adapters, by name."""
        with self._lock:
            return tuple(
                AdapterCard(name=name, digest=found.digest, rank=found.rank)
                for name, found in sorted(self._found.items())
            )

    def rescan(self) -> bool:
        """Look into the directory of adapters again; returns whether anything changed."""
        directory = self._config.directory
        if directory is None:
            return False
        found = dict(self._fixed)
        try:
            paths = sorted(directory.iterdir())
        except OSError as error:
            _log.warning("the adapters in %s are out of reach: %s", directory, error)
            return False
        for path in paths:
            if path.name not in found and len(found) < MAX_ADAPTERS:
                each = self._look(path)
                if each is not None:
                    found[path.name] = each
        with self._lock:
            changed = found != self._found
            self._found = found
            gone = [name for name in self._loaded if name not in found]
            for name in gone:
                del self._loaded[name]
        return changed

    def get(self, name: str) -> LoadedAdapter:
        """Return an adapter, loaded now if it was not.

        Raises ``UnknownAdapter`` if there is none of this name, ``ModelError`` if it does not fit.
        """
        with self._lock:
            found = self._found.get(name)
            if found is None:
                raise UnknownAdapter(name, sorted(self._found))
            loaded = self._loaded.get(name)
            if loaded is None or loaded.digest != found.digest:
                loaded = self._loaded_now(name, found)
            self._loaded[name] = loaded
            self._loaded.move_to_end(name)
            while len(self._loaded) > self._config.max_loras:
                self._loaded.popitem(last=False)
            return loaded

    def _loaded_now(self, name: str, found: _Found) -> LoadedAdapter:
        try:
            # Read again, and not kept open: whoever writes to a mapped file breaks us.
            loaded = self._load(name, self._read(found.path))
        except ModelError as error:
            if _stamp(found.path) is not None:
                raise
            # Taken out since the last look.
            raise UnknownAdapter(name, sorted(self._found.keys() - {name})) from error
        _log.info("loaded adapter %s: %.1f MiB", name, loaded.num_bytes / (1 << 20))
        return loaded

    def _look(self, path: Path) -> _Found | None:
        # What somebody is still copying, or does not fit, is passed over until it changes.
        stamp = _stamp(path)
        if stamp is None:
            return None
        known = self._found.get(path.name)
        if known is not None and known.stamp == stamp:
            return known
        if self._refused.get(path.name) == stamp:
            return None
        try:
            return self._checked(path.name, path)
        except ModelError as error:
            _log.warning("adapter %s is left out: %s", path, error)
        except Exception:
            # One bad directory must not end the workers of all who look into it.
            _log.warning("adapter %s is left out, it cannot be checked", path, exc_info=True)
        self._refused[path.name] = stamp
        return None

    def _checked(self, name: str, path: Path) -> _Found:
        """Read an adapter; whether it fits the model is known before a job asks for it."""
        try:
            _NAME.validate_python(name)
        except ValidationError as error:
            raise UnsupportedModel(
                f"{name[:200]!r} is no name for an adapter", fix="Use 1 to 128 characters."
            ) from error
        # Stamped before it is read, so that a change meanwhile is seen the next time.
        stamp = _stamp(path) or ()
        files = self._read(path)
        self._check(name, files)
        return _Found(path, stamp, files.digest, files.rank)

    def _read(self, path: Path) -> AdapterFiles:
        files = read_adapter(path)
        if files.rank > self._config.max_rank:
            raise UnsupportedModel(
                f"{path}: rank {files.rank} exceeds max_lora_rank {self._config.max_rank}",
                fix=f"Start the worker with --max-lora-rank {files.rank}.",
            )
        return files


def _stamp(path: Path) -> _Stamp | None:
    """Return what tells versions of an adapter apart; None if it is not complete."""
    stamps = []
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        try:
            status = (path / name).stat()
        except OSError:
            return None
        stamps.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(stamps)
