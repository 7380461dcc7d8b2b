"""The blob store: a blob is there as a whole or not at all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.protocol.errors import BlobError, BlobNotFound, ConfigError
from tidemill.service.blobs.store import BlobStore


@pytest.fixture(params=["directory", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    address = {"directory": str(tmp_path / "blobs"), "memory": f"memory://{tmp_path.name}"}
    return BlobStore(address[request.param])


def put(store: BlobStore, name: str, data: bytes) -> None:
    with store.writer(name) as writer:
        writer.write(data)
        writer.commit()


def read(store: BlobStore, name: str) -> bytes:
    with store.reader(name) as file:
        return file.read()


def test_what_was_committed_is_read_back(store: BlobStore) -> None:
    put(store, "a/b/c", b"tide" * 100_000)
    assert read(store, "a/b/c") == b"tide" * 100_000
    assert store.size("a/b/c") == 400_000


def test_a_blob_can_be_read_from_the_middle(store: BlobStore) -> None:
    put(store, "lines", b"one\ntwo\nthree\n")
    with store.reader("lines") as file:
        file.seek(4)
        assert file.readline() == b"two\n"


def test_nothing_is_seen_before_the_commit_or_without_one(store: BlobStore) -> None:
    with store.writer("a") as writer:
        writer.write(b"half")
        assert not store.has("a")
    assert not store.has("a")
    assert not list(store.list())


def test_a_second_write_replaces_the_first_as_a_whole(store: BlobStore) -> None:
    put(store, "a", b"long content")
    put(store, "a", b"short")
    assert read(store, "a") == b"short"


def test_a_folder_is_deleted_with_all_that_is_in_it_and_deleting_may_be_repeated(
    store: BlobStore,
) -> None:
    for name in ("t/1", "t/2", "other"):
        put(store, name, b"x")
    store.delete("t")
    store.delete("t")
    assert [blob.name for blob in store.list()] == ["other"]


def test_a_missing_blob_is_told_by_name(store: BlobStore) -> None:
    with pytest.raises(BlobNotFound, match="absent"), store.reader("absent"):
        pass
    with pytest.raises(BlobNotFound, match="absent"):
        store.size("absent")


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../out", "a/../b", "a//b", "a/./b"])
def test_no_name_leads_out_of_the_store(store: BlobStore, name: str) -> None:
    with pytest.raises(BlobError, match="no name"):
        store.writer(name)
    with pytest.raises(BlobError, match="no name"):
        store.delete(name)


def test_an_address_that_nobody_can_open_says_what_would_do() -> None:
    with pytest.raises(ConfigError, match="cannot be opened"):
        BlobStore("nosuchkind://bucket/prefix")


_WRITER = """
import os, sys
from tidemill.service.blobs.store import BlobStore
writer = BlobStore(sys.argv[1]).writer("a")
writer.write(b"new" * 1000)
writer._file.flush()
os._exit(9)
"""


def test_a_writer_that_dies_leaves_the_old_blob_and_a_part_that_can_be_told(
    tmp_path: Path,
) -> None:
    store = BlobStore(str(tmp_path))
    put(store, "a", b"old")
    done = subprocess.run([sys.executable, "-c", _WRITER, str(tmp_path)], check=False)
    assert done.returncode == 9
    assert read(store, "a") == b"old"
    [part] = [blob for blob in store.list() if blob.name != "a"]
    assert part.name.endswith(".part") and part.num_bytes == 3000
    os.utime(tmp_path / part.name, (0, 0))
    [part] = [blob for blob in store.list() if blob.name != "a"]
    assert part.age_seconds > 10**9
