"""Tokenizers by digest: from memory, from the cache directory, or from Redis."""

import asyncio
import importlib.util
import re
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

import redis
import redis.asyncio

from tidemill.protocol.errors import ConfigError, MalformedMessage, UnknownModel
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import ModelCard
from tidemill.service.redis import translate

if TYPE_CHECKING:  # needs the tokenizer extra, which an SDK may lack
    from tidemill.service.tokenizer import Tokenizer

#: Whether the ``tokenizer`` extra is installed; without it a producer sends text.
HAS_TOKENIZERS = all(importlib.util.find_spec(name) for name in ("tokenizers", "jinja2"))

#: A tokenizer takes some 50 MB of memory.
MAX_IN_MEMORY = 8

_DIGEST = re.compile(r"[0-9a-f]{64}")


class TokenizerStore:
    """Tokenizers of this machine: the last few in memory, all in ``cache_dir`` if it is given.

    Safe to share between threads.  What is on disk is used only if its digest fits its name.
    """

    def __init__(self, cache_dir: Path | None = None) -> None:
        self._directory = None if cache_dir is None else cache_dir / "tokenizers"
        self._loaded: OrderedDict[str, Tokenizer] = OrderedDict()
        self._lock = threading.Lock()

    def peek(self, digest: str) -> "Tokenizer | None":
        """Return a tokenizer that is in memory."""
        with self._lock:
            if digest in self._loaded:
                self._loaded.move_to_end(digest)
            return self._loaded.get(digest)

    def load(self, digest: str) -> "Tokenizer | None":
        """Return a tokenizer that is in memory or on disk."""
        found = self.peek(digest)
        if found is None and (bundle := self._read(digest)):
            try:
                found = self._keep(digest, bundle)
            except MalformedMessage:
                return None  # a torn or foreign file: the true one is fetched and replaces it
        return found

    def add(self, digest: str, bundle: bytes) -> "Tokenizer":
        """Keep ``bundle``; raises ``MalformedMessage`` if it is not what ``digest`` names."""
        tokenizer = self._keep(digest, bundle)
        self._write(digest, bundle)
        return tokenizer

    def _keep(self, digest: str, bundle: bytes) -> "Tokenizer":
        # Imported here: this module must load without the tokenizer extra.
        from tidemill.service.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_bundle(bundle)
        if tokenizer.digest != digest:
            raise MalformedMessage(
                f"tokenizer bundle: its digest is {tokenizer.digest}, not {digest}"
            )
        with self._lock:
            self._loaded[digest] = tokenizer
            while len(self._loaded) > MAX_IN_MEMORY:
                self._loaded.popitem(last=False)
        return tokenizer

    def _read(self, digest: str) -> bytes | None:
        if self._directory is None:
            return None
        try:
            return (self._directory / digest).read_bytes()
        except OSError:
            return None

    def _write(self, digest: str, bundle: bytes) -> None:
        if self._directory is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._directory) as scratch:
                whole = Path(scratch) / digest
                whole.write_bytes(bundle)
                whole.replace(self._directory / digest)
        except OSError:
            return  # a full or read-only disk costs a download at the next start, nothing more


class RedisTokenizers:
    """Finds the tokenizer that a model card names."""

    def __init__(self, keys: ShardKeys, store: TokenizerStore) -> None:
        self._keys = keys
        self._store = store
        self._lock = threading.Lock()

    def get(self, client: redis.Redis, card: ModelCard) -> "Tokenizer":
        """Return the card's tokenizer; several threads load it once.

        Raises ``ConfigError`` without the tokenizer extra, ``UnknownModel`` if Redis has not got
        it, ``MalformedMessage`` if it is damaged, ``BrokerUnavailable``.
        """
        digest = _checked_digest(card)
        found = self._store.peek(digest)
        if found is not None:
            return found
        with self._lock:
            found = self._store.load(digest)
            if found is None:
                with translate():
                    bundle = client.getrange(self._keys.tokenizer(digest), 0, _last_byte())
                found = self._store.add(digest, _checked_bundle(bundle, card))
        return found


class AsyncRedisTokenizers:
    """``RedisTokenizers`` for an event loop.

    Files and digests are read beside it; while the library parses a tokenizer, for some tenths of a
    second, it lets no other thread run.
    """

    def __init__(self, keys: ShardKeys, store: TokenizerStore) -> None:
        self._keys = keys
        self._store = store
        self._lock = asyncio.Lock()

    async def get(self, client: redis.asyncio.Redis, card: ModelCard) -> "Tokenizer":
        """Return the card's tokenizer; concurrent calls load it once.  Raises as its twin."""
        digest = _checked_digest(card)
        found = self._store.peek(digest)
        if found is not None:
            return found
        async with self._lock:
            found = await asyncio.to_thread(self._store.load, digest)
            if found is None:
                with translate():
                    bundle = await client.getrange(self._keys.tokenizer(digest), 0, _last_byte())
                checked = _checked_bundle(bundle, card)
                found = await asyncio.to_thread(self._store.add, digest, checked)
        return found


def _checked_digest(card: ModelCard) -> str:
    if not HAS_TOKENIZERS:
        raise ConfigError(
            "tokenising needs the packages tokenizers and jinja2",
            fix="Install tidemill[tokenizer], or send prompts as text.",
        )
    # It becomes a file name, and the card comes from Redis.
    if not _DIGEST.fullmatch(card.tokenizer_digest):
        raise MalformedMessage(f"card of model {card.name!r}: tokenizer_digest is no SHA-256")
    return card.tokenizer_digest


def _last_byte() -> int:
    from tidemill.service.tokenizer import MAX_BUNDLE_BYTES

    return MAX_BUNDLE_BYTES  # one byte more than allowed, so that an oversized one is told


def _checked_bundle(bundle: bytes | str, card: ModelCard) -> bytes:
    if not isinstance(bundle, bytes):
        raise ConfigError("the Redis client decodes replies", fix="Use decode_responses=False.")
    if not bundle:
        raise UnknownModel(
            f"model: the tokenizer of {card.name!r} is not registered any more",
            field="model",
            fix="Start a worker that serves the model.",
        )
    return bundle
