"""The blob store where it is a bucket: as a directory is, and within bounds of time."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.s3_server import BUCKET, needs_s3, put
from tidemill.protocol.errors import BlobError, BlobNotFound, BlobUnavailable
from tidemill.service.blobs import remote
from tidemill.service.blobs.identity import store_identity
from tidemill.service.blobs.store import BlobStore

pytestmark = needs_s3


def test_a_blob_is_written_replaced_read_in_ranges_listed_and_deleted(s3_store: BlobStore) -> None:
    put(s3_store, "a/b/one", b"old")
    put(s3_store, "a/b/one", b"first\nsecond\nthird\n")
    put(s3_store, "a/two", b"2")
    with s3_store.reader("a/b/one") as file:
        file.seek(6)
        assert file.readline() == b"second\n"
        assert file.read(3) == b"thi"
        file.seek(0)
        assert list(file) == [b"first\n", b"second\n", b"third\n"]
    found = {blob.name: blob.num_bytes for blob in s3_store.list("a")}
    assert found == {"a/b/one": 19, "a/two": 1}
    assert all(0 <= blob.age_seconds < 600 for blob in s3_store.list())
    s3_store.delete("a")
    s3_store.delete("a")
    assert not list(s3_store.list()) and not s3_store.has("a/two")
    with pytest.raises(BlobNotFound, match=f"a/two in s3://{BUCKET}/"):
        s3_store.read("a/two")


def test_a_blob_is_not_seen_before_its_commit_nor_without_one(s3_store: BlobStore) -> None:
    with s3_store.writer("a") as writer:
        writer.write(bytes(20 << 20))
        assert not s3_store.has("a")
    assert not list(s3_store.list())


def test_what_another_process_replaced_is_not_remembered(s3_url: str) -> None:
    one = BlobStore(s3_url)
    put(one, "a", b"short")
    assert [blob.num_bytes for blob in one.list()] == [5]
    program = (
        "import sys; from support.s3_server import *; put(BlobStore(sys.argv[1]), 'a', b'x' * 9)"
    )
    tests = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", program, s3_url], cwd=tests, check=True)
    assert one.read("a") == b"x" * 9


def test_processes_with_one_store_read_one_identity(s3_url: str) -> None:
    assert store_identity(BlobStore(s3_url)) == store_identity(BlobStore(f"{s3_url}/"))


def test_a_bucket_that_does_not_exist_is_told_by_name(s3_url: str) -> None:
    store = BlobStore("s3://nobodys-bucket/x")
    with pytest.raises(BlobError, match="s3://nobodys-bucket/x does not exist") as refused:
        put(store, "a", b"x")
    assert "Create its bucket" in refused.value.one_line()
    assert not store.has("a")


def test_a_server_that_is_not_there_is_told_by_name(s3_keys: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        s3_keys.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{taken.getsockname()[1]}")
    store = BlobStore("s3://tide/x")
    told = re.compile("s3://tide/x cannot be reached.*AWS_ENDPOINT_URL_S3", re.DOTALL)
    with pytest.raises(BlobUnavailable) as away:
        put(store, "a", b"x")
    assert told.search(away.value.one_line())
    for call in (store.read, store.has, store.delete):
        with pytest.raises(BlobUnavailable):
            call("a")
    with pytest.raises(BlobUnavailable):
        list(store.list())


def test_a_server_that_says_nothing_is_given_up(s3_keys: pytest.MonkeyPatch) -> None:
    s3_keys.setattr(remote, "_READ_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        s3_keys.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{silent.getsockname()[1]}")
        store = BlobStore("s3://tide/x")
        with pytest.raises(BlobUnavailable, match="s3://tide/x cannot be reached"):
            store.size("a")


def test_keys_that_are_missing_are_asked_for(
    s3_address: str, s3_keys: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    s3_keys.setenv("AWS_ENDPOINT_URL_S3", s3_address)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        s3_keys.delenv(name)
    s3_keys.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        s3_keys.setenv(name, str(tmp_path / "none"))
    with pytest.raises(BlobError, match="s3://tide/x refused a") as refused:
        put(BlobStore("s3://tide/x"), "a", b"x")
    assert "Set AWS_ACCESS_KEY_ID" in refused.value.one_line()
