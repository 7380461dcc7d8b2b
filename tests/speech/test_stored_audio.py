"""Audio that is too large for a message: how it is named, priced and found."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from tidemill import TranscribeSpec
from tidemill.protocol.codec import encode
from tidemill.protocol.errors import BlobError, BlobNotFound, ConfigError
from tidemill.protocol.files import file_blob
from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.requests import (
    MAX_STORED_AUDIO_BYTES,
    StoredAudio,
    TranscribeRequest,
    decode_request,
)
from tidemill.service.audio_length import audio_seconds
from tidemill.service.blobs.identity import store_identity
from tidemill.service.blobs.store import BlobStore
from tidemill.service.job_inputs import TOKENS_PER_WINDOW, speech_cost
from tidemill_gpuworker.speech.stored_audio import AudioSource

KEYS = ShardKeys("00")


def stored(file_id: str = "file-a", **fields: object) -> StoredAudio:
    given = {"file_id": file_id, "num_bytes": 9, "seconds": 61.0, "sha256": "0" * 64, **fields}
    return StoredAudio.model_validate(given)


def source(root: Path) -> AudioSource:
    return AudioSource(KEYS, lambda: BlobStore(str(root)))


def put(root: Path, tenant: str, file_id: str, content: bytes) -> None:
    with BlobStore(str(root)).writer(file_blob(KEYS, tenant, file_id)) as writer:
        writer.write(content)
        writer.commit()


def test_a_job_has_its_audio_or_says_where_it_is() -> None:
    request = TranscribeRequest(model="m", stored=stored())
    assert decode_request(encode(request)) == request
    for fields in ({}, {"audio": b"x", "stored": stored()}):
        with pytest.raises(ValidationError, match="either audio or stored"):
            TranscribeRequest.model_validate({"model": "m", **fields})
    for wrong in ({"file_id": "../x"}, {"num_bytes": MAX_STORED_AUDIO_BYTES + 1}, {"sha256": "x"}):
        with pytest.raises(ValidationError):
            stored(**wrong)


def test_stored_audio_costs_the_windows_that_its_header_tells_of() -> None:
    cost = speech_cost(TranscribeRequest(model="m", stored=stored()))
    assert cost.cost == 3 * TOKENS_PER_WINDOW
    header = b"RIFF....WAVEfmt " + (16).to_bytes(4, "little") + bytes(8)
    header += (16_000).to_bytes(4, "little") + bytes(4)
    header += b"data" + (32_000_000).to_bytes(4, "little")
    # The beginning of the file is enough, given its size; what is cut off is not counted.
    assert audio_seconds(header, 32_000_000 + len(header)) == 2000.0
    assert audio_seconds(header, 16_000 + len(header)) == 1.0
    assert audio_seconds(b"ID3", 80_000) == 10.0


def test_the_same_content_under_another_id_is_the_same_request() -> None:
    def digest(audio: StoredAudio) -> str:
        return TranscribeSpec(audio, idempotency_key="k").draft("default").body_digest

    assert digest(stored("file-a")) == digest(stored("file-b"))
    assert digest(stored()) != digest(stored(sha256="1" * 64))


def test_a_worker_reads_the_files_of_the_jobs_tenant_alone(tmp_path: Path) -> None:
    put(tmp_path, "alice", "file-a", b"hers")
    reader = source(tmp_path)
    request = TranscribeRequest(model="m", tenant="alice", stored=stored())
    assert reader.read(request) == b"hers"
    assert reader.read(TranscribeRequest(model="m", audio=b"own")) == b"own"
    with pytest.raises(BlobNotFound, match="file-a is not in this worker"):
        reader.read(request.model_copy(update={"tenant": "bob"}))


def test_processes_with_one_store_read_one_name_and_others_another(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    name = store_identity(BlobStore(str(first)))
    assert name and store_identity(BlobStore(str(first))) == name == source(first).identity
    assert store_identity(BlobStore(str(second))) != name


def test_a_worker_without_a_store_still_serves_what_comes_with_its_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> BlobStore:
        raise ConfigError("nowhere to be found")

    reader = AudioSource(KEYS, fail)
    assert reader.identity == "" and "nowhere to be found" in caplog.text
    assert reader.read(TranscribeRequest(model="m", audio=b"own")) == b"own"
    with pytest.raises(BlobError, match="reads no blob store"):
        reader.read(TranscribeRequest(model="m", stored=stored()))
