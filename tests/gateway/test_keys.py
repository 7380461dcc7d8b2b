"""Stored keys over HTTP: who gets in, to what, whose work one sees, and what logs tell."""

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from gateway.conftest import MODEL, Site
from gateway.locked import Caller, LockedGate, locked_gate
from support.wait import wait_until
from tidemill._link import Link
from tidemill.access.api_keys import KeyScope
from tidemill.gateway.http_protocol import MAX_HEAD_BYTES, MAX_HEADERS
from tidemill.protocol.keys import ShardKeys
from tidemill_webhooks.admin import HookAdmin

COMPLETIONS = "/v1/completions"
SHORT: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 2}
#: Nobody else's prompt, so that nobody else has it in the cache; 80 tokens and more.
LONG = "the miller counts " + " ".join(f"sack {n}" for n in range(40))


@pytest.fixture(scope="module")
def gate(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockedGate]:
    """A gateway that asks for keys."""
    with locked_gate(site, tmp_path_factory.mktemp("locked")) as gate:
        yield gate


def cached(client: Caller, prompt: str, **options: Any) -> int:
    """How many tokens of a prompt came out of the cache."""
    answer = client.post(COMPLETIONS, json={**SHORT, "prompt": prompt, **options})
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens") or 0)


def test_whoever_has_no_valid_key_stays_outside(gate: LockedGate) -> None:
    key, client = gate.key("acme")
    assert client.get("/v1/models").status_code == 200
    wrong = f"tmk_{key.key_id}_{'A' * 43}"
    unknown = f"tmk_00{'0' * 26}_{'A' * 43}"
    elsewhere = f"tmk_07{'0' * 26}_{'A' * 43}"
    answers = [gate.caller(bearer).get("/v1/models") for bearer in ("x", wrong, unknown, elsewhere)]
    assert {answer.status_code for answer in answers} == {401}
    # What is wrong with it is not told.
    assert len({answer.text for answer in answers}) == 1
    assert httpx.get(f"{gate.url}/v1/models").status_code == 401


def test_who_has_a_key_cannot_name_another_tenant(gate: LockedGate) -> None:
    (_, mine), (_, other) = gate.key("acme"), gate.key("rival")
    job = mine.post("/v1/jobs", json=SHORT, headers={"x-tidemill-tenant": "rival"}).json()["id"]
    assert mine.get(f"/v1/jobs/{job}").status_code == 200
    assert other.get(f"/v1/jobs/{job}").status_code == 404


def test_a_salt_finds_what_its_own_tenant_cached_under_it_and_nothing_else(
    gate: LockedGate,
) -> None:
    (_, mine), (_, other) = gate.key("acme"), gate.key("rival")
    prompt = f"salted: {LONG}"
    assert cached(mine, prompt, cache_salt="one") == 0
    assert cached(mine, prompt, cache_salt="one") >= 16
    # Another salt, none, and the same one of another tenant.
    assert cached(mine, prompt, cache_salt="two") == 0
    assert cached(mine, prompt) == 0
    assert cached(other, prompt, cache_salt="one") == 0
    assert cached(other, prompt) == 0
    # Each has its own from now on, and what was cached first is still found.
    for client, options in ((mine, {"cache_salt": "one"}), (mine, {}), (other, {})):
        assert cached(client, prompt, **options) >= 16


def test_a_revoked_key_is_out_within_seconds_and_its_use_was_noted(gate: LockedGate) -> None:
    key, client = gate.key("acme")
    assert client.get("/v1/models").status_code == 200

    def is_noted() -> bool:
        return any(each.used_ms for each in gate.store.all() if each.key_id == key.key_id)

    wait_until(is_noted, 10, "its use is noted")
    gate.store.revoke(key.key_id)
    wait_until(lambda: client.get("/v1/models").status_code == 401, 10, "it is out")


def test_a_key_may_do_what_its_scopes_say_and_no_more(gate: LockedGate) -> None:
    _, reader = gate.key("acme", frozenset({KeyScope.READ}))
    _, writer = gate.key("acme", frozenset({KeyScope.SUBMIT}))
    refused = reader.post(COMPLETIONS, json=SHORT)
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "insufficient_permissions"
    job = writer.post("/v1/jobs", json=SHORT).json()
    assert writer.get(f"/v1/jobs/{job['id']}").status_code == 403
    assert reader.get(f"/v1/jobs/{job['id']}").status_code == 200
    for client in (reader, writer):
        assert client.post(f"/v1/jobs/{job['id']}/cancel").status_code == 403


def test_a_key_submits_no_more_than_it_may_in_a_minute(gate: LockedGate) -> None:
    _, client = gate.key("acme", requests_per_minute=1)
    statuses = [client.post(COMPLETIONS, json=SHORT) for _ in range(2)]
    assert [answer.status_code for answer in statuses] == [200, 429]
    assert 1 <= int(statuses[1].headers["retry-after"]) <= 60
    assert client.get("/v1/models").status_code == 200


def test_metrics_are_open_only_where_they_are_not_protected(site: Site, gate: LockedGate) -> None:
    _, client = gate.key("acme")
    assert client.get("/metrics").status_code == 200
    assert httpx.get(f"{gate.url}/metrics").status_code == 401
    assert httpx.get(f"{gate.url}/health").status_code == 200
    assert httpx.get(f"{site.url}/metrics").status_code == 200


def test_what_is_anothers_is_not_there(gate: LockedGate) -> None:
    (_, mine), (_, other) = gate.key("acme"), gate.key("rival")
    job = mine.post("/v1/jobs", json=SHORT).json()["id"]
    line = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": SHORT}
    upload = {"file": ("in.jsonl", json.dumps(line).encode())}
    file = mine.post("/v1/files", data={"purpose": "batch"}, files=upload).json()["id"]
    ask = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
    batch = mine.post("/v1/batches", json=ask).json()["id"]
    asked = {"model": MODEL, "input": "hello", "max_output_tokens": 16}
    told = mine.post("/v1/responses", json=asked).json()["id"]
    places = [
        *(("GET", f"/v1/responses/{told}{rest}") for rest in ("", "/input_items")),
        *(("POST", f"/v1/responses/{told}/cancel"), ("DELETE", f"/v1/responses/{told}")),
        *(("GET", f"/v1/jobs/{job}{rest}") for rest in ("", "/result", "/stream")),
        *(("POST", f"/v1/jobs/{job}/cancel"), ("DELETE", f"/v1/jobs/{job}")),
        *(("GET", f"/v1/files/{file}"), ("GET", f"/v1/files/{file}/content")),
        *(("DELETE", f"/v1/files/{file}"), ("GET", f"/v1/batches/{batch}")),
        ("POST", f"/v1/batches/{batch}/cancel"),
    ]
    answers = {place: other.request(*place) for place in places}
    assert {place: answer.status_code for place, answer in answers.items()} == dict.fromkeys(
        places, 404
    )
    assert other.post("/v1/batches", json=ask).status_code == 404
    asked["previous_response_id"] = told
    assert other.post("/v1/responses", json=asked).status_code in (400, 404)
    assert other.get("/v1/files").json()["data"] == other.get("/v1/batches").json()["data"] == []
    # Nothing of that did anything: its owner finds all of it.
    for place in places:
        if place[0] == "GET":
            assert mine.request(*place).status_code in (200, 202), place
    assert mine.post(f"/v1/jobs/{job}/cancel").json()["status"] != "cancelled"


def test_tenants_share_no_idempotency_keys(gate: LockedGate) -> None:
    headers = {"idempotency-key": "the same"}
    (_, mine), (_, other) = gate.key("acme"), gate.key("rival")
    ids = [
        client.post("/v1/jobs", json=SHORT, headers=headers).json()["id"]
        for client in (mine, mine, other)
    ]
    assert ids[0] == ids[1] != ids[2]


def test_a_tenant_hits_its_own_cached_prefixes_and_nobody_elses(gate: LockedGate) -> None:
    (_, mine), (_, same), (_, other) = gate.key("acme"), gate.key("acme"), gate.key("rival")
    assert cached(mine, LONG) == 0
    # Whichever key: the salt is the tenant's.
    assert cached(same, LONG) > 0
    assert cached(other, LONG) == 0
    assert cached(other, LONG) > 0


def test_headers_are_bounded(gate: LockedGate) -> None:
    many = {f"x-h-{n}": "v" for n in range(MAX_HEADERS + 1)}
    for headers in (many, {"x-long": "v" * MAX_HEAD_BYTES}):
        answer = httpx.get(f"{gate.url}/version", headers=headers)
        assert answer.status_code == 431 and answer.json()["error"]["message"]
    assert httpx.get(f"{gate.url}/version?{'q' * MAX_HEAD_BYTES}").status_code == 431


def test_headers_that_do_not_come_end_the_connection(gate: LockedGate) -> None:
    address = urlsplit(gate.url)
    whole = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    for begin in (b"GET /version HTTP/1.1\r\nhost: x\r\nx-slow: ", whole + b"GET /v", b""):
        with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
            connection.sendall(begin)
            told = _read_to_end(connection)
        if not begin:
            assert told == b""
            continue
        assert told.endswith(b'"code":"timeout"}}') and b" 408 " in told
        assert told.startswith(b"HTTP/1.1 200" if begin.startswith(whole) else b"HTTP/1.1 408")


def _read_to_end(connection: socket.socket) -> bytes:
    told = b""
    while data := connection.recv(4096):
        told += data
    return told


def test_no_log_tells_secrets_or_prompts(site: Site, gate: LockedGate) -> None:
    secret = "whsec_" + "c2VjcmV0" * 4
    prompt = "unspeakable prose"
    _, client = gate.key("hooked")
    link = Link(site.stack.url, "00", 30)
    admin = HookAdmin(link, ShardKeys(), "hooked")
    # Nobody listens there, and the scheduler refuses to look: both would be told in the log.
    admin.add("https://127.0.0.1:9/hook", secret=secret, allow_private=True)
    bodies: list[dict[str, Any]] = [
        {**SHORT, "prompt": prompt, "nonsense": prompt},
        {**SHORT, "prompt": prompt, "temperature": prompt},
        {**SHORT, "prompt": prompt, "model": "nobody"},
        {**SHORT, "prompt": prompt, "structured_outputs": {"regex": "(" + prompt}},
    ]
    statuses = [client.post(COMPLETIONS, json=body).status_code for body in bodies]
    assert statuses[0] == 200 and all(status >= 400 for status in statuses[1:])
    client.get(f"/v1/models?api_key={gate.issued[-1]}")
    wait_until(lambda: any(each.attempts for each in admin.deliveries()), 20, "it is tried")
    link.close()
    logs = gate.log_path.read_text() + "\n".join(site.log)
    assert "/v1/completions" in logs, "the log of requests is off"
    assert "the miller counts" not in logs and prompt not in logs and secret not in logs
    for token in gate.issued:
        assert token.split("_", 2)[2] not in logs
