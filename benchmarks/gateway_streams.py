"""What the gateway adds to a token stream: CPU and latency, beside the SDK reading the same.

    python benchmarks/gateway_streams.py --streams 64 256 --tokens 100 --rate 10

Tokens come from a worker without an engine, ``--rate`` a second for each stream, and their texts
are when they were written.  Streams begin one after the other within ``--spread`` seconds, since
among those that begin at once the median waits for half of the others.  The tokens of all streams
fall due at one instant, which is the worst there is, or with ``--batch N`` those of N at most, as
the sequences of a worker's batch do.

  tokens/CPU-s, CPU  of the process that hands tokens on: the gateway, or the SDK's
  TTFT               ms from a request's begin to its first token, through the whole queue; what
                     the gateway adds is the difference of the two rows
  p50, p99           ms from a token's write to its arrival

``--idle N`` opens N streams that wait and tells the memory of each.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import uvloop
from gateway_mill import MODEL, PROMPT
from queue_meter import start_server

from tidemill import AsyncProducer

MILL = Path(__file__).with_name("gateway_mill.py")
_BEFORE = b'"content":"'


@dataclass(frozen=True, slots=True)
class Figures:
    """One run; times in seconds, latencies in ms from a token's write to its arrival."""

    path: str
    num_streams: int
    num_tokens: int
    seconds: float
    cpu_seconds: float
    ttft_p50_ms: float
    p50_ms: float
    p99_ms: float
    peak_mib: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens that arrived in a second of wall time."""
        return self.num_tokens / self.seconds

    @property
    def tokens_per_cpu_second(self) -> float:
        """Tokens for a second of the CPU of the process that handed them on."""
        return self.num_tokens / self.cpu_seconds if self.cpu_seconds else 0.0


class Lags:
    """How long tokens were under way."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.all: list[float] = []

    def note(self, written: Sequence[str], begun: float | None, now: float) -> None:
        """Note tokens that arrived at ``now``, given when they were written.

        ``begun`` is when the request began, if they are its first.
        """
        if begun is not None and written:
            self.first.append(1000 * (now - begun))
        self.all += [1000 * (now - float(text)) for text in written]

    def figures(self, path: str, streams: int, seconds: float, cpu: float, mib: float) -> Figures:
        """Sum up."""
        ordered = sorted(self.all)
        return Figures(
            path=path,
            num_streams=streams,
            num_tokens=len(ordered),
            seconds=seconds,
            cpu_seconds=cpu,
            ttft_p50_ms=statistics.median(self.first),
            p50_ms=statistics.median(ordered),
            p99_ms=ordered[int(0.99 * (len(ordered) - 1))],
            peak_mib=mib,
        )


async def one_by_one(follow: Callable[[], Awaitable[None]], num: int, spread: float) -> None:
    """Follow so many streams, which begin evenly within so many seconds."""

    async def begin(delay: float) -> None:
        await asyncio.sleep(delay)
        await follow()

    await asyncio.gather(*(begin(spread * place / num) for place in range(num)))


class Reader(asyncio.Protocol):
    """Sends a request and notes what comes and when; to read it can wait until the end.

    All readers share a process: what they do while tokens come would be taken for the gateway's.
    """

    def __init__(self, request: bytes) -> None:
        self.ended = asyncio.Event()
        self._request = request
        self._begun = time.monotonic()
        self._arrived: list[tuple[float, bytes]] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Send the request."""
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Note it."""
        self._arrived.append((time.monotonic(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        """Let the others know."""
        self.ended.set()

    def tell(self, lags: Lags) -> None:
        """Note how long all tokens took."""
        pending = b""
        begun: float | None = self._begun
        for when, data in self._arrived:
            *whole, pending = (pending + data).split(b"\n\n")
            texts = [
                text
                for event in whole
                for text in event.partition(_BEFORE)[2].partition(b'"')[0].decode().split()
            ]
            lags.note(texts, begun, when)
            begun = None if texts else begun


async def read_http(port: int, lags: Lags, num: int, spread: float = 0.0) -> None:
    """Follow so many chats over raw connections: a client's library would cost more than we."""
    body = json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "stream": True}
    ).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    )

    async def follow() -> None:
        reader = Reader(head + body)
        await asyncio.get_running_loop().create_connection(lambda: reader, "127.0.0.1", port)
        await reader.ended.wait()
        reader.tell(lags)

    await one_by_one(follow, num, spread)


async def read_sdk(url: str, lags: Lags, num: int, spread: float) -> None:
    """Follow as many jobs with the SDK."""
    async with AsyncProducer(url, timeout=60) as producer:

        async def follow() -> None:
            begun: float | None = time.monotonic()
            job = await producer.submit([1, 2, 3], model=MODEL)
            async for chunk in job.stream():
                texts = chunk.text.split()
                lags.note(texts, begun, time.monotonic())
                begun = None if texts else begun

        await one_by_one(follow, num, spread)


@contextmanager
def mill(url: str, options: argparse.Namespace, num: int) -> Iterator[None]:
    """Run the worker for one round."""
    command = [sys.executable, str(MILL), url, "--jobs", str(num), "--tokens"]
    command += [str(options.tokens), "--pause-seconds", str(1 / options.rate)]
    command += ["--batch", str(options.batch)] if options.batch else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        assert process.wait(600) == 0


@contextmanager
def gateway(url: str) -> Iterator[tuple[psutil.Process, int]]:
    """Run a gateway; yields its process and its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tidemill.gateway", "--redis-url", url, "--port", str(port)]
    with subprocess.Popen(command) as process:
        try:
            while not _is_open(port):
                time.sleep(0.05)
            yield psutil.Process(process.pid), port
        finally:
            process.terminate()
            process.wait(60)


def measure_gateway(url: str, options: argparse.Namespace, num: int) -> Figures:
    """Follow streams through a gateway."""
    lags = Lags()
    with gateway(url) as (process, port):
        # The first request of a process loads the tokenizer.
        with mill(url, argparse.Namespace(tokens=1, rate=options.rate, batch=0), 1):
            asyncio.run(read_http(port, Lags(), 1))
        with mill(url, options, num):
            cpu, started = _cpu(process), time.perf_counter()
            uvloop.run(read_http(port, lags, num, options.spread))
            seconds, cpu = time.perf_counter() - started, _cpu(process) - cpu
        memory = process.memory_info().rss / 2**20
    return lags.figures("gateway", num, seconds, cpu, memory)


def measure_sdk(url: str, options: argparse.Namespace, num: int) -> Figures:
    """Follow streams without one, in this process."""
    lags = Lags()
    with mill(url, options, num):
        cpu, started = time.process_time(), time.perf_counter()
        uvloop.run(read_sdk(url, lags, num, options.spread))
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return lags.figures("sdk", num, seconds, cpu, psutil.Process().memory_info().rss / 2**20)


def measure_idle(url: str, num: int) -> tuple[float, float]:
    """Return what streams whose jobs wait take: KiB of memory each, CPU of the gateway in all."""

    async def wait_for_heads(port: int) -> tuple[float, float]:
        tasks = [asyncio.create_task(read_http(port, Lags(), 1)) for _ in range(num)]
        before = process.memory_info().rss
        deadline = time.monotonic() + 300
        while len(process.net_connections()) < num and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        # By then they look for news as seldom as they ever do.
        await asyncio.sleep(25.0)
        cpu, started = _cpu(process), time.perf_counter()
        await asyncio.sleep(20.0)
        share = (_cpu(process) - cpu) / (time.perf_counter() - started)
        grown = process.memory_info().rss - before
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return grown / num / 1024, share

    with gateway(url) as (process, port), _registered(url):
        return asyncio.run(wait_for_heads(port))


@contextmanager
def _registered(url: str) -> Iterator[None]:
    """Register the model, with a worker that takes nothing."""
    command = [sys.executable, str(MILL), url, "--jobs", "1", "--tokens", "1"]
    command += ["--pause-seconds", "0", "--rounds", "0"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    yield


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def show(figures: Figures) -> None:
    """Print one row."""
    print(
        f"{figures.path:8} {figures.num_streams:7} {figures.tokens_per_second:10,.0f}"
        f" {figures.tokens_per_cpu_second:12,.0f} {figures.cpu_seconds / figures.seconds:8.0%}"
        f" {figures.ttft_p50_ms:9.1f} {figures.p50_ms:8.1f} {figures.p99_ms:8.1f}"
        f" {figures.peak_mib:8.0f}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[64])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--spread", type=float, default=5.0, help="seconds (%(default)s)")
    parser.add_argument("--batch", type=int, default=0, help="sequences that fall due together")
    parser.add_argument("--idle", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    rows: list[Figures] = []
    print("path     streams   tokens/s  tokens/CPU-s  CPU   TTFT ms   p50 ms   p99 ms      MiB")
    with tempfile.TemporaryDirectory() as scratch, start_server(Path(scratch), "none") as server:
        url = f"unix://{server.socket_path}"
        for num in options.streams:
            for measure in (measure_sdk, measure_gateway):
                server.empty()
                rows.append(measure(url, options, num))
                show(rows[-1])
        if options.idle:
            server.empty()
            size, share = measure_idle(url, options.idle)
            print(f"{options.idle} idle streams: {size:.1f} KiB each, {share:.0%} of a core")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
