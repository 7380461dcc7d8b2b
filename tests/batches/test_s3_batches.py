"""Files and batches on a store that speaks S3: shared by gateways, never whole in memory."""

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from support.batch_shop import ENDPOINT, create, jsonl, outcome, request_line, serving
from support.forwarder import Forwarder
from support.s3_server import needs_s3
from support.shard import KEYS
from support.wait import wait_until, wait_until_async
from tidemill.protocol.files import file_blob
from tidemill.service.blobs.store import BlobStore
from tidemill_scheduler.batches.sweep import StoreSweep

pytestmark = needs_s3

BIG_BYTES = 60 << 20
#: What the gateway may take beside the file: blocks on their way, and s3fs itself.
BIG_GROWTH_BYTES = 48 << 20


@dataclass
class Gateway:
    """A gateway as a process of its own."""

    url: str
    process: "subprocess.Popen[bytes]"

    def peak_bytes(self) -> int:
        """The most memory that it has had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        [kib] = re.findall(r"VmHWM:\s+(\d+) kB", status)
        return int(kib) * 1024


@contextlib.contextmanager
def gateway(redis_url: str, blob_url: str) -> Iterator[Gateway]:
    import httpx2 as httpx

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    environment = {
        **os.environ,
        "TIDEMILL_REDIS_URL": redis_url,
        "TIDEMILL_BLOB_URL": blob_url,
        "TIDEMILL_SHARD": KEYS.shard,
    }
    command = [sys.executable, "-m", "tidemill.gateway", "--port", str(port)]
    process = subprocess.Popen(command, env=environment)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/version", timeout=5).status_code == 200
        return False

    try:
        wait_until(answers, 60)
        yield Gateway(url, process)
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def batch_runner(redis_url: str, blob_url: str, log: Path | None = None) -> Iterator[None]:
    tests = Path(__file__).parents[1]
    program = "import sys; from support.batch_runner import main; main(*sys.argv[1:])"
    command = [sys.executable, "-c", program, redis_url, blob_url]
    with log.open("wb") if log else contextlib.nullcontext() as stderr:
        process = subprocess.Popen(command, cwd=tests, stderr=stderr)
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


def send(site: Gateway, content: Any) -> Any:
    """Send a file as OpenAI's clients do, piece by piece."""
    import httpx2 as httpx

    edge = "edge"
    head = (
        f'--{edge}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{edge}\r\n'
        'Content-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    )

    def body() -> Iterator[bytes]:
        yield head.encode()
        yield from content
        yield f"\r\n--{edge}--\r\n".encode()

    headers = {"content-type": f"multipart/form-data; boundary={edge}"}
    return httpx.post(f"{site.url}/v1/files", content=body(), headers=headers, timeout=100)


def test_a_batch_runs_to_its_end_and_two_gateways_share_its_files(
    redis_client: redis.Redis, redis_url: str, s3_url: str, s3_store: BlobStore
) -> None:
    import httpx2 as httpx

    good, bad = [request_line(n) for n in range(40)], request_line(99, model="nobody's")
    with (
        gateway(redis_url, s3_url) as here,
        gateway(redis_url, s3_url) as there,
        batch_runner(redis_url, s3_url),
        serving(redis_url),
    ):
        file = send(here, [jsonl([*good, bad])]).json()
        asked = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        batch = httpx.post(f"{there.url}/v1/batches", json=asked, timeout=30).json()
        path = f"/v1/batches/{batch['id']}"

        def told() -> Any:
            return httpx.get(f"{here.url}{path}", timeout=30).json()

        wait_until(lambda: told()["status"] in ("completed", "failed"), 90)
        batch = told()
        assert batch["status"] == "completed", batch
        assert batch["request_counts"] == {"total": 41, "completed": 40, "failed": 1}
        lines = [
            json.loads(line)
            for kind in ("output", "error")
            for site in (here, there)
            for line in httpx.get(
                f"{site.url}/v1/files/{batch[f'{kind}_file_id']}/content", timeout=30
            ).content.splitlines()
        ]
        wanted = [line["custom_id"] for line in [*good, bad] for _ in range(2)]
        assert sorted(line["custom_id"] for line in lines) == sorted(wanted)
        assert not list(s3_store.list(f"{KEYS.shard}/parts"))
        gone = f"/v1/files/{batch['output_file_id']}"
        assert httpx.delete(f"{there.url}{gone}", timeout=30).json()["deleted"]
        for rest in ("", "/content"):
            assert httpx.get(f"{here.url}{gone}{rest}", timeout=30).status_code == 404


async def test_a_batch_waits_for_a_store_that_is_away_and_loses_nothing(
    redis_client: redis.Redis,
    redis_url: str,
    s3_address: str,
    s3_url: str,
    s3_store: BlobStore,
    s3_keys: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from tidemill.batches.client import AsyncBatches

    server, log = s3_address.removeprefix("http://"), tmp_path / "log"
    async with AsyncBatches(redis_url, blobs=s3_store) as client:
        batch = await create(client, [request_line(n) for n in range(40)])
        with Forwarder("") as way, serving(redis_url):
            port = way.url.rpartition(":")[2].partition("/")[0]
            s3_keys.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
            with batch_runner(redis_url, s3_url, log):
                await wait_until_async(lambda: b"cannot be reached" in log.read_bytes(), 90)
                assert b"begins again" in log.read_bytes()
                way.move_to(server)
                while not (batch := await client.batch(batch.batch_id)).state.is_terminal:
                    await asyncio.sleep(0.1)
        output, errors = await outcome(client, batch)
    assert sorted(line["custom_id"] for line in output) == sorted(f"id-{n}" for n in range(40))
    assert not errors


async def test_a_deleted_file_leaves_the_bucket_with_the_next_sweep(
    redis_client: redis.Redis, redis_url: str, s3_url: str, s3_store: BlobStore
) -> None:
    from tidemill.batches.client import AsyncBatches

    async def content() -> Any:
        yield b"x"

    async with AsyncBatches(redis_url, blobs=s3_store) as client:
        file = await client.create_file(content(), filename="a", purpose="batch")
        await client.delete_file(file.file_id)
    name = file_blob(KEYS, "default", file.file_id)
    assert s3_store.has(name)
    redis_client.zadd(KEYS.stored_until, {f"file default {file.file_id}": 1})
    async with redis.asyncio.Redis.from_url(redis_url) as leader:
        assert await StoreSweep(leader, KEYS, s3_store).forget_due() == 1
    assert not s3_store.has(name)


def test_a_large_file_goes_in_and_out_and_is_never_whole_in_memory(
    redis_client: redis.Redis, redis_url: str, s3_url: str, s3_store: BlobStore
) -> None:
    import httpx2 as httpx

    piece = bytes(range(256)) * 4096
    with gateway(redis_url, s3_url) as site:
        small = send(site, [b"x"]).json()["id"]
        assert httpx.get(f"{site.url}/v1/files/{small}/content", timeout=30).content == b"x"
        before = site.peak_bytes()
        file = send(site, (piece for _ in range(BIG_BYTES // len(piece)))).json()
        assert file["bytes"] == BIG_BYTES
        sent = site.peak_bytes()
        num_bytes = 0
        with httpx.stream("GET", f"{site.url}/v1/files/{file['id']}/content", timeout=60) as answer:
            for data in answer.iter_bytes(len(piece)):
                assert data == piece
                num_bytes += len(data)
        assert num_bytes == BIG_BYTES
        print(f"peak: {before >> 20} MiB, sent {sent >> 20}, read {site.peak_bytes() >> 20}")
        assert site.peak_bytes() - before < BIG_GROWTH_BYTES
    name = file_blob(KEYS, "default", file["id"])
    with s3_store.reader(name) as blob:
        blob.seek(BIG_BYTES - 256)
        assert blob.read() == bytes(range(256))


def test_a_store_that_is_away_makes_a_503_that_says_when_to_come_again(
    redis_client: redis.Redis, redis_url: str, s3_url: str, s3_keys: pytest.MonkeyPatch
) -> None:
    import httpx2 as httpx

    with gateway(redis_url, s3_url) as well:
        file_id = send(well, [b"x"]).json()["id"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        s3_keys.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{taken.getsockname()[1]}")
    with gateway(redis_url, s3_url) as cut_off:
        read = httpx.get(f"{cut_off.url}/v1/files/{file_id}/content", timeout=60)
        for answer in (send(cut_off, [b"x"]), read):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert answer.json()["error"]["message"] == "the store of files cannot be reached"
        assert httpx.get(f"{cut_off.url}/v1/files", timeout=30).json()["data"][0]["id"] == file_id
