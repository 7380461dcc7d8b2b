"""Tokenizers are fetched from Redis once and kept; nothing that does not fit its digest is used."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import redis
import redis.asyncio
import tokenizers

from tidemill.protocol.errors import (
    BrokerUnavailable,
    ConfigError,
    MalformedMessage,
    UnknownModel,
)
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.messages import ModelCard
from tidemill.service import tokenizer_cache
from tidemill.service.redis import connect, connect_async
from tidemill.service.tokenizer import Tokenizer
from tidemill.service.tokenizer_cache import (
    AsyncRedisTokenizers,
    RedisTokenizers,
    TokenizerStore,
)
from tidemill.service.tokenizer_files import TokenizerFiles

KEYS = ShardKeys()


def make_tokenizer(*words: str) -> Tokenizer:
    vocab = {word: index for index, word in enumerate(("?", *words))}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "?"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return Tokenizer(TokenizerFiles(raw.to_str()))


def card_of(tokenizer: Tokenizer, digest: str | None = None) -> ModelCard:
    return ModelCard(
        name="m",
        revision="r",
        tokenizer_digest=tokenizer.digest if digest is None else digest,
        max_model_len=10,
        vocab_size=10,
    )


def store_bundle(client: redis.Redis, card: ModelCard, bundle: bytes) -> None:
    client.set(KEYS.tokenizer(card.tokenizer_digest), bundle, ex=60)


def num_reads(client: redis.Redis) -> int:
    stats = client.info("commandstats")
    return int(stats.get("cmdstat_getrange", {}).get("calls", 0))


@pytest.fixture
def tokenizer() -> Tokenizer:
    return make_tokenizer("hello", "world")


@pytest.fixture
def stored(redis_client: redis.Redis, tokenizer: Tokenizer) -> redis.Redis:
    store_bundle(redis_client, card_of(tokenizer), tokenizer.to_bundle())
    redis_client.config_resetstat()
    return redis_client


def test_a_tokenizer_is_read_from_redis_once(stored: redis.Redis, tokenizer: Tokenizer) -> None:
    found = RedisTokenizers(KEYS, TokenizerStore())
    first = found.get(stored, card_of(tokenizer))
    assert first.encode("hello world") == [1, 2]
    assert found.get(stored, card_of(tokenizer)) is first
    assert num_reads(stored) == 1


def test_many_threads_read_it_once(stored: redis.Redis, tokenizer: Tokenizer) -> None:
    found = RedisTokenizers(KEYS, TokenizerStore())
    got: list[Tokenizer] = []
    barrier = threading.Barrier(8)

    def fetch() -> None:
        barrier.wait(30)
        got.append(found.get(stored, card_of(tokenizer)))

    threads = [threading.Thread(target=fetch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(got) == 8 and len(set(map(id, got))) == 1
    assert num_reads(stored) == 1


async def test_many_tasks_read_it_once(
    stored: redis.Redis, redis_url: str, tokenizer: Tokenizer
) -> None:
    found = AsyncRedisTokenizers(KEYS, TokenizerStore())
    async with connect_async(redis_url) as client:
        got = await asyncio.gather(*(found.get(client, card_of(tokenizer)) for _ in range(8)))
    assert len(set(map(id, got))) == 1
    assert num_reads(stored) == 1


def test_the_cache_directory_serves_the_next_process(
    stored: redis.Redis, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    RedisTokenizers(KEYS, TokenizerStore(tmp_path)).get(stored, card_of(tokenizer))
    stored.flushall()
    again = RedisTokenizers(KEYS, TokenizerStore(tmp_path)).get(stored, card_of(tokenizer))
    assert again.digest == tokenizer.digest
    assert [path.name for path in (tmp_path / "tokenizers").iterdir()] == [tokenizer.digest]


@pytest.mark.parametrize("content", [b"", b"torn", make_tokenizer("other").to_bundle()])
def test_a_damaged_cache_file_is_fetched_again(
    stored: redis.Redis, tokenizer: Tokenizer, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "tokenizers" / tokenizer.digest
    path.parent.mkdir()
    path.write_bytes(content)
    found = RedisTokenizers(KEYS, TokenizerStore(tmp_path)).get(stored, card_of(tokenizer))
    assert found.digest == tokenizer.digest
    assert Tokenizer.from_bundle(path.read_bytes()).digest == tokenizer.digest


def test_an_unwritable_cache_directory_only_costs_the_cache(
    stored: redis.Redis, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "tokenizers").write_text("a file in the way")
    found = RedisTokenizers(KEYS, TokenizerStore(tmp_path)).get(stored, card_of(tokenizer))
    assert found.digest == tokenizer.digest


def test_a_bundle_of_another_digest_is_refused(
    redis_client: redis.Redis, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    store_bundle(redis_client, card_of(tokenizer), make_tokenizer("evil").to_bundle())
    with pytest.raises(MalformedMessage, match="digest"):
        RedisTokenizers(KEYS, TokenizerStore(tmp_path)).get(redis_client, card_of(tokenizer))
    assert not (tmp_path / "tokenizers").exists()


def test_a_digest_that_is_a_path_is_refused(
    redis_client: redis.Redis, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    card = card_of(tokenizer, "../" * 20 + "etc/passwd")
    with pytest.raises(MalformedMessage, match="SHA-256"):
        RedisTokenizers(KEYS, TokenizerStore(tmp_path)).get(redis_client, card)


def test_a_tokenizer_that_is_gone_names_the_model(
    redis_client: redis.Redis, tokenizer: Tokenizer
) -> None:
    with pytest.raises(UnknownModel, match="'m'") as caught:
        RedisTokenizers(KEYS, TokenizerStore()).get(redis_client, card_of(tokenizer))
    assert caught.value.field == "model"


async def test_the_async_twin_tells_the_same_errors(
    redis_client: redis.Redis, redis_url: str, tokenizer: Tokenizer
) -> None:
    found = AsyncRedisTokenizers(KEYS, TokenizerStore())
    async with connect_async(redis_url) as client:
        with pytest.raises(UnknownModel):
            await found.get(client, card_of(tokenizer))
        store_bundle(redis_client, card_of(tokenizer), b"damaged")
        with pytest.raises(MalformedMessage):
            await found.get(client, card_of(tokenizer))


def test_an_unreachable_server_is_told_as_such(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with (
        connect(f"unix://{tmp_path}/none.sock", retries=0) as client,
        pytest.raises(BrokerUnavailable),
    ):
        RedisTokenizers(KEYS, TokenizerStore()).get(client, card_of(tokenizer))


def test_memory_holds_the_most_recently_used_tokenizers_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer_cache, "MAX_IN_MEMORY", 2)
    made = [make_tokenizer(word) for word in ("a", "b", "c")]
    store = TokenizerStore()
    for tokenizer in made[:2]:
        store.add(tokenizer.digest, tokenizer.to_bundle())
    assert store.peek(made[0].digest)
    store.add(made[2].digest, made[2].to_bundle())
    assert [store.peek(tokenizer.digest) is not None for tokenizer in made] == [True, False, True]


def test_without_the_extra_the_error_names_it(
    redis_client: redis.Redis, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_cache, "HAS_TOKENIZERS", False)
    with pytest.raises(ConfigError, match="tokenizers") as caught:
        RedisTokenizers(KEYS, TokenizerStore()).get(redis_client, card_of(tokenizer))
    assert "tidemill[tokenizer]" in caught.value.fix


def test_prompt_and_cache_load_without_the_extra() -> None:
    script = (
        "import sys; sys.modules.update(tokenizers=None, jinja2=None);"
        "import tidemill.service.prompt, tidemill.service.tokenizer_cache"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
