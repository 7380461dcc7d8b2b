"""A server that speaks S3, as a process of a test; ``python -m support.s3_server`` runs it."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tidemill.service.blobs.store import BlobStore

_MISSING = [name for name in ("s3fs", "moto") if importlib.util.find_spec(name) is None]

#: What a module that uses the server is marked with.
needs_s3 = [
    pytest.mark.s3,
    pytest.mark.skipif(bool(_MISSING), reason=f"needs {', '.join(_MISSING)}: make s3-check"),
]
BUCKET = "tide"
#: What s3fs finds its server and its keys by; the server takes any keys.
AWS_KEYS = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "tests",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@contextmanager
def running_s3_server() -> Iterator[str]:
    """Run a server on a port that is free; yields its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "support.s3_server"],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        try:
            address = process.stdout.readline().strip()
            assert address, "the S3 server did not start"
            yield address
        finally:
            process.stdin.close()  # which is its sign to leave


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    with running_s3_server() as address:
        yield address


@pytest.fixture
def s3_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The environment of whoever speaks to the server; file systems are not kept from before."""
    from s3fs import S3FileSystem

    for name, value in AWS_KEYS.items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()
    yield monkeypatch
    S3FileSystem.clear_instance_cache()


@pytest.fixture
def s3_url(s3_address: str, s3_keys: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A new folder of a bucket."""
    from s3fs import S3FileSystem

    s3_keys.setenv("AWS_ENDPOINT_URL_S3", s3_address)
    S3FileSystem().mkdirs(BUCKET, exist_ok=True)
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture
def s3_store(s3_url: str) -> BlobStore:
    return BlobStore(s3_url)


def put(store: BlobStore, name: str, data: bytes) -> None:
    with store.writer(name) as writer:
        writer.write(data)
        writer.commit()


def main() -> None:
    """Serve until standard input ends."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    print(f"http://{host}:{port}", flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
