"""A server that speaks S3, as a process of a test; ``python -m support.s3_server`` runs it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: What s3fs finds its server and its keys by; the server takes any keys.
KEYS = {
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
