"""A hub on localhost: the endpoints that ``huggingface_hub`` asks for a model's files."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Tells what was asked for; has one model, ``org/tiny``, with the revisions *main* and *v1*.

    ``org/empty`` has no file at all.
    """

    files: Mapping[str, bytes]
    url: str = ""
    #: Answers for repositories other than the model: name -> (status, error code of the hub).
    refusals: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def downloads(self) -> set[str]:
        """Names of the files whose content was sent."""
        prefix = f"GET /org/tiny/resolve/{COMMIT}/"
        return {line.removeprefix(prefix) for line in self.requests if line.startswith(prefix)}


@contextmanager
def serve_hub(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve until the body is left; sets the hub's address."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.hub.requests.append(f"{self.command} {path}")
        if path == f"/api/models/org/tiny/tree/{COMMIT}":
            self._list_files(self.hub.files)
        elif path == f"/api/models/org/empty/tree/{COMMIT}":
            self._list_files({})
        elif path.startswith("/api/models/"):
            self._describe(path.removeprefix("/api/models/"))
        else:
            self._send_file(path)

    def _describe(self, path: str) -> None:
        repository, _, revision = path.partition("/revision/")
        if repository in self.hub.refusals:
            status, code = self.hub.refusals[repository]
            self._send(status, b"{}", {"X-Error-Code": code})
        elif repository not in ("org/tiny", "org/empty"):
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", "v1", COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            files = self.hub.files if repository == "org/tiny" else {}
            siblings = [{"rfilename": name} for name in files]
            described = {"id": repository, "sha": COMMIT, "siblings": siblings}
            self._send(200, json.dumps(described).encode(), {"Content-Type": "application/json"})

    def _list_files(self, files: Mapping[str, bytes]) -> None:
        entries = [
            {"type": "file", "path": name, "size": len(content), "oid": _tag(content)[:40]}
            for name, content in files.items()
        ]
        self._send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})

    def _send_file(self, path: str) -> None:
        content = self.hub.files.get(path.removeprefix(f"/org/tiny/resolve/{COMMIT}/"))
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        self._send(200, content, {"ETag": f'"{_tag(content)}"', "X-Repo-Commit": COMMIT})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _tag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
