"""The HTTP endpoint: metrics, health, and what a wrong request or port gets."""

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from support.wait import wait_until
from tidemill.protocol.errors import PortInUse
from tidemill.service.metrics import MetricsServer


class Answer(NamedTuple):
    status: int
    content_type: str
    body: str


def get(server: MetricsServer, path: str, accept: str = "*/*") -> Answer:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}", headers={"Accept": accept}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return Answer(reply.status, reply.headers["Content-Type"], reply.read().decode())
    except urllib.error.HTTPError as refused:
        with refused:
            return Answer(refused.code, refused.headers["Content-Type"], refused.read().decode())


def healthy() -> tuple[bool, Mapping[str, Any]]:
    return True, {"queue": 3}


def test_all_registries_are_served_with_their_present_values() -> None:
    first, second = CollectorRegistry(), CollectorRegistry()
    jobs = Counter("jobs_total", "Jobs.", registry=first)
    Gauge("blocks_free", "Free blocks.", registry=second).set(5)
    with MetricsServer(0, health=healthy, registries=(first, second)) as server:
        jobs.inc(2)
        answer = get(server, "/metrics")
    assert answer.status == 200
    assert answer.content_type.startswith("text/plain")
    assert "jobs_total 2.0" in answer.body
    assert "blocks_free 5.0" in answer.body


def test_a_scraper_may_ask_for_openmetrics() -> None:
    registries = (CollectorRegistry(), CollectorRegistry())
    with MetricsServer(0, health=healthy, registries=registries) as server:
        answer = get(server, "/metrics", "application/openmetrics-text; version=1.0.0")
    assert answer.content_type.startswith("application/openmetrics-text")
    assert answer.body.count("# EOF") == 1


def test_a_healthy_process_says_so_with_details() -> None:
    with MetricsServer(0, health=healthy) as server:
        answer = get(server, "/healthz?verbose=1")
    assert (answer.status, answer.content_type) == (200, "application/json")
    assert json.loads(answer.body) == {"ok": True, "queue": 3}


def test_an_unhealthy_process_answers_503() -> None:
    with MetricsServer(0, health=lambda: (False, {"why": "no dispatch for 30 s"})) as server:
        answer = get(server, "/healthz")
    assert answer.status == 503
    assert json.loads(answer.body) == {"ok": False, "why": "no dispatch for 30 s"}


def test_a_health_check_that_breaks_counts_as_unhealthy(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> tuple[bool, Mapping[str, Any]]:
        raise RuntimeError("do not tell strangers")

    with MetricsServer(0, health=broken) as server:
        answer = get(server, "/healthz")
    assert answer.status == 503
    assert json.loads(answer.body) == {"ok": False, "error": "RuntimeError"}
    assert "do not tell strangers" in caplog.text


def test_an_unknown_path_is_404() -> None:
    with MetricsServer(0, health=healthy) as server:
        assert get(server, "/").status == 404


def test_a_used_port_is_refused() -> None:
    server = MetricsServer(0, health=healthy)
    with server, pytest.raises(PortInUse, match=str(server.port)):
        MetricsServer(server.port, health=healthy)
    with pytest.raises(PortInUse, match="70000"):
        MetricsServer(70000, health=healthy)


def test_close_frees_the_port_and_ends_the_thread() -> None:
    threads = threading.active_count()
    server = MetricsServer(0, health=healthy)
    get(server, "/healthz")
    port = server.port
    server.close()
    server.close()
    wait_until(lambda: threading.active_count() == threads)
    MetricsServer(port, health=healthy).close()


def test_without_prometheus_client_the_import_names_the_extra() -> None:
    script = "import sys; sys.modules['prometheus_client'] = None; import tidemill.service.metrics"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "tidemill[worker]" in result.stderr.splitlines()[-1]
