"""Audio that is too large for a job waits in the blob store."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from support.fake_mill import KEYS
from support.twins import MakeTwin, Twin
from tidemill import InvalidRequest, JobNotFinished, Producer
from tidemill.batches.client import AsyncBatches
from tidemill.protocol import calls
from tidemill.protocol.functions import run
from tidemill.protocol.messages import ModelCard, WorkerInfo
from tidemill.protocol.requests import (
    MAX_AUDIO_BYTES,
    MAX_STORED_AUDIO_BYTES,
    StoredAudio,
    TranscribeRequest,
    decode_request,
)
from tidemill.service.blobs.identity import store_identity
from tidemill.service.blobs.store import BlobStore
from tidemill.service.config import load_config

LARGE = bytes(range(256)) * (MAX_AUDIO_BYTES // 256 + 1)


@pytest.fixture
def ears(redis_client: redis.Redis) -> Iterator[BlobStore]:
    """A worker of speech that takes no job; returns the store that it reads."""
    blobs = BlobStore(load_config().blob_url)
    listen(redis_client, store_identity(blobs))
    yield blobs
    redis_client.delete(KEYS.model("ears"), KEYS.worker_info("wkr_e"), KEYS.tokenizer("d"))
    redis_client.zrem(KEYS.models, "ears")
    redis_client.zrem(KEYS.workers, "wkr_e")


def listen(client: redis.Redis, store: str) -> None:
    info = WorkerInfo(
        worker_id="wkr_e",
        model="ears",
        num_blocks=1,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        wire_version=1,
    )
    card = ModelCard(
        name="ears",
        revision="r",
        tokenizer_digest="d",
        max_model_len=448,
        vocab_size=100,
        task="transcribe",
        blob_store=store,
    )
    run(client, calls.register(KEYS, info=info, card=card, tokenizer=b"", lease_ms=60_000))


def files(url: str) -> list[str]:
    async def listed() -> list[str]:
        async with AsyncBatches(url) as batches:
            return [file.file_id for file in (await batches.files()).items]

    return asyncio.run(listed())


def stored_of(producer: Twin, client: redis.Redis) -> StoredAudio:
    [status] = producer.jobs()
    request = decode_request(client.hget(KEYS.job(status.job_id), "req") or b"")
    assert isinstance(request, TranscribeRequest) and request.stored is not None
    return request.stored


def test_a_large_file_is_in_the_store_while_its_job_may_need_it(
    make_twin: MakeTwin, redis_url: str, redis_client: redis.Redis, ears: BlobStore, tmp_path: Path
) -> None:
    path = tmp_path / "talk.wav"
    path.write_bytes(LARGE)
    producer = make_twin(redis_url)
    # Somebody may ask for this job again, so its file stays although nobody waits any more.
    with pytest.raises(JobNotFinished):
        producer.transcribe(path, model="ears", timeout=0.1, idempotency_key="again")
    stored = stored_of(producer, redis_client)
    assert stored.num_bytes == len(LARGE) and files(redis_url) == [stored.file_id]
    [name] = [blob.name for blob in ears.list() if stored.file_id in blob.name]
    assert ears.read(name) == LARGE
    producer.cancel_tenant()


def test_a_job_that_is_given_up_leaves_no_file(
    make_twin: MakeTwin, redis_url: str, ears: BlobStore
) -> None:
    producer = make_twin(redis_url)
    with pytest.raises(JobNotFinished):
        producer.transcribe(LARGE, model="ears", timeout=0.1)
    [status] = producer.jobs()
    assert status.state == "cancelled" and files(redis_url) == []


def test_a_small_file_travels_with_its_job(
    make_twin: MakeTwin, redis_url: str, ears: BlobStore
) -> None:
    producer = make_twin(redis_url)
    with pytest.raises(JobNotFinished):
        producer.transcribe(LARGE[:1000], model="ears", timeout=0.1, idempotency_key="small")
    assert files(redis_url) == []
    producer.cancel_tenant()


def test_what_the_worker_could_not_read_is_refused(
    make_twin: MakeTwin, redis_url: str, redis_client: redis.Redis, ears: BlobStore
) -> None:
    producer = make_twin(redis_url)
    with pytest.raises(InvalidRequest, match="audio: 26214401 bytes, the limit is 26214400"):
        producer.transcribe(bytes(MAX_STORED_AUDIO_BYTES + 1), model="ears")
    listen(redis_client, "another")
    with make_fresh(redis_url) as fresh, pytest.raises(InvalidRequest, match="read no blob store"):
        fresh.transcribe(LARGE, model="ears")
    assert files(redis_url) == []


def make_fresh(url: str) -> Producer:
    """One that has seen no card yet."""
    return Producer(url)
