"""``/v1/files`` and ``/v1/batches`` over HTTP: forms, pages, errors, batches from end to end."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from gateway.client import ask, post
from gateway.conftest import MODEL, Site
from tidemill.gateway.uploads import MAX_FIELD_BYTES, MAX_PARTS, UploadForm
from tidemill.protocol.errors import InvalidRequest

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def upload(site: Site, data: bytes, **fields: str) -> httpx.Response:
    """Send a file, for a batch unless the fields say otherwise."""
    return httpx.post(
        f"{site.url}/v1/files",
        data={"purpose": "batch", **fields},
        files={"file": ("in.jsonl", data)},
        timeout=60,
    )


def get(site: Site, path: str) -> Any:
    """The body of an answer that is well."""
    answer = httpx.get(f"{site.url}{path}", timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def run_batch(site: Site, endpoint: str, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """Work off requests as a batch; returns it at its end."""
    lines = [
        {"custom_id": f"id-{n}", "method": "POST", "url": endpoint, "body": body}
        for n, body in enumerate(bodies)
    ]
    file = upload(site, b"\n".join(json.dumps(line).encode() for line in lines)).json()
    asked = {"input_file_id": file["id"], "endpoint": endpoint, "metadata": {"of": "test"}}
    batch: dict[str, Any] = post(site, "/v1/batches", asked).json()
    deadline = time.monotonic() + 60
    while batch["status"] not in ("completed", "failed"):
        assert time.monotonic() < deadline, batch
        batch = get(site, f"/v1/batches/{batch['id']}")
    return batch


def content(site: Site, file_id: str) -> list[dict[str, Any]]:
    """The lines of a file."""
    answer = httpx.get(f"{site.url}/v1/files/{file_id}/content", timeout=60)
    assert answer.headers["content-length"] == str(len(answer.content))
    return [json.loads(line) for line in answer.content.splitlines()]


def test_a_batch_is_not_told_to_an_address_on_our_side(site: Site) -> None:
    asked = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}
    answer = post(site, "/v1/batches", {**asked, "callback_url": "https://169.254.169.254/"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "callback_url"


def form(purpose: str, num_bytes: int, *, purpose_first: bool) -> Iterator[bytes]:
    """A form with a file of zeros, never whole in memory."""
    told = f'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'.encode()
    if purpose_first:
        yield told
    yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    piece = bytes(1 << 20)
    for start in range(0, num_bytes, len(piece)):
        yield piece[: num_bytes - start]
    yield b"\r\n" + (b"" if purpose_first else told) + b"--b--\r\n"


@pytest.mark.parametrize("purpose_first", [True, False])
def test_a_batch_of_more_than_200_mb_is_answered_413_that_names_the_limit(
    site: Site, purpose_first: bool
) -> None:
    answer = httpx.post(
        f"{site.url}/v1/files",
        content=form("batch", 200_000_001, purpose_first=purpose_first),
        headers={"content-type": "multipart/form-data; boundary=b"},
        timeout=60,
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (413, "request_too_large", "file")
    assert "200000000 bytes" in error["message"]


def test_a_file_is_stored_told_listed_read_and_deleted(site: Site) -> None:
    data = b"\r\n--boundary\r\n" * 50_000 + bytes(range(256))
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"}
    file = upload(site, data, **fields).json()
    assert (file["object"], file["bytes"], file["filename"]) == ("file", len(data), "in.jsonl")
    assert file["expires_at"] - file["created_at"] in (7199, 7200, 7201)
    assert get(site, f"/v1/files/{file['id']}") == file
    assert file in get(site, "/v1/files?purpose=batch&limit=5&order=desc")["data"]
    answer = httpx.get(f"{site.url}/v1/files/{file['id']}/content", timeout=60)
    assert answer.content == data
    assert answer.headers["content-type"] == "application/octet-stream"
    deleted = httpx.delete(f"{site.url}/v1/files/{file['id']}", timeout=60)
    assert deleted.json() == {"id": file["id"], "object": "file", "deleted": True}
    for path in ("", "/content"):
        gone = httpx.get(f"{site.url}/v1/files/{file['id']}{path}", timeout=60)
        assert gone.status_code == 404 and gone.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "batch_output"}, "purpose"),
        ({"expires_after[anchor]": "created_at"}, "expires_after.seconds"),
        ({"expires_after": "[1"}, "expires_after"),
    ],
)
def test_a_form_with_a_wrong_field_is_refused_by_its_name(
    site: Site, fields: dict[str, str], param: str
) -> None:
    answer = upload(site, b"x", **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b""),
        ("multipart/form-data; boundary=b", b""),
        ("multipart/form-data; boundary=b", b"no form"),
        ("multipart/form-data; boundary=b", b'--b\r\nContent-Disposition: form-data; name="file"'),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n',
        ),
    ],
)
def test_what_is_no_form_with_a_file_is_refused(site: Site, kind: str, body: bytes) -> None:
    headers = {"content-type": kind}
    answer = httpx.post(f"{site.url}/v1/files", content=body, headers=headers, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_form_means_the_same_however_it_is_cut() -> None:
    body = (
        b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Type: text/plain\r\nContent-Disposition: form-data; name="file";'
        b' filename="a.jsonl"\r\n\r\nline\r\n--not the boundary\r\n--b--\r\n'
    )
    for size in (1, 2, 7, len(body)):
        form = UploadForm("multipart/form-data; boundary=b")
        pieces = [
            piece
            for start in range(0, len(body), size)
            for piece in form.feed(body[start : start + size])
        ]
        form.finish()
        assert b"".join(pieces) == b"line\r\n--not the boundary"
        assert (form.fields, form.filename) == ({"purpose": "batch"}, "a.jsonl")


def test_fields_that_are_not_the_file_are_bounded() -> None:
    form = UploadForm("multipart/form-data; boundary=b")
    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n'
    with pytest.raises(InvalidRequest, match=f"more than {MAX_FIELD_BYTES} bytes"):
        form.feed(head + bytes(100_000))


@pytest.mark.parametrize("header", [b"Content-Disposition: form-data; name=", b"X-", b"X: "])
def test_what_stands_above_the_parts_of_a_form_is_bounded(header: bytes) -> None:
    form = UploadForm("multipart/form-data; boundary=b")
    part = b"--b\r\n" + header + b"a" * 4000 + b": \r\n\r\n\r\n"
    with pytest.raises(InvalidRequest, match=f"more than {MAX_FIELD_BYTES} bytes"):
        form.feed(part * (MAX_FIELD_BYTES // 4000 + 1))


def test_a_form_has_a_bounded_number_of_parts() -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n'
    form = UploadForm("multipart/form-data; boundary=b")
    form.feed(part * MAX_PARTS)
    with pytest.raises(InvalidRequest, match=f"more than {MAX_PARTS} fields"):
        form.feed(part)


def test_a_boundary_that_is_too_long_is_refused_and_so_is_json_that_is_too_deep() -> None:
    with pytest.raises(InvalidRequest, match="Boundary"):
        UploadForm(f"multipart/form-data; boundary={'a' * 300}")
    form = UploadForm("multipart/form-data; boundary=b")
    field = b'--b\r\nContent-Disposition: form-data; name="expires_after"\r\n\r\n'
    form.feed(field + b"[" * 60_000 + b"\r\n--b--\r\n")
    with pytest.raises(InvalidRequest) as refused:
        form.nested("expires_after")
    assert refused.value.field == "expires_after"


def test_a_batch_answers_as_the_endpoint_does(site: Site) -> None:
    bodies = [
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"tell me of {n}"}],
            "max_tokens": 4,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 2,
            "stream": True,
        }
        for n in range(3)
    ]
    bodies.append({"model": MODEL, "messages": [], "max_tokens": 4})
    batch = run_batch(site, CHAT, bodies)
    assert batch["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
    assert batch["metadata"] == {"of": "test"} and batch["model"] == MODEL
    lines = {line["custom_id"]: line["response"] for line in content(site, batch["output_file_id"])}
    for number, body in enumerate(bodies[:3]):
        answer = ask(site, CHAT, **{k: v for k, v in body.items() if k not in ("model", "stream")})
        told = lines[f"id-{number}"]["body"]
        assert told["object"] == answer["object"]
        assert _rounded(told["choices"]) == _rounded(answer["choices"])
        assert told["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    [error] = content(site, batch["error_file_id"])
    refused = post(site, CHAT, bodies[3])
    assert error["response"]["status_code"] == refused.status_code == 400
    assert error["response"]["body"] == refused.json()


def _rounded(value: Any) -> Any:
    """A body whose numbers may differ in their last digits: other jobs were in the same step."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


def test_a_line_with_several_prompts_is_answered_as_one(site: Site) -> None:
    body = {"model": MODEL, "prompt": ["one", "two"], "max_tokens": 3, "temperature": 0, "n": 1}
    batch = run_batch(site, COMPLETION, [body])
    [line] = content(site, batch["output_file_id"])
    answer = post(site, COMPLETION, body).json()
    assert line["response"]["body"]["choices"] == answer["choices"]
    assert batch["usage"]["output_tokens"] == answer["usage"]["completion_tokens"] == 6


def test_batches_are_listed_and_refused_as_openai_tells_it(site: Site) -> None:
    batch = run_batch(site, COMPLETION, [{"model": MODEL, "prompt": "a", "max_tokens": 1}])
    page = get(site, "/v1/batches?limit=1")
    assert page["data"][0]["id"] == batch["id"] == page["first_id"] == page["last_id"]
    ended = post(site, f"/v1/batches/{batch['id']}/cancel", None)
    assert ended.status_code == 409 and "completed" in ended.json()["error"]["message"]
    for path in ("/v1/batches/batch_0", "/v1/batches/batch_0/cancel"):
        method = "POST" if path.endswith("cancel") else "GET"
        answer = httpx.request(method, f"{site.url}{path}", timeout=60)
        assert answer.status_code == 404
    asked = {"input_file_id": batch["input_file_id"], "endpoint": "/v1/images/generations"}
    answer = post(site, "/v1/batches", asked)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "endpoint")
    missing = post(site, "/v1/batches", {"input_file_id": "file-0", "endpoint": CHAT})
    assert missing.status_code == 404
    assert httpx.get(f"{site.url}/v1/batches?limit=0", timeout=60).status_code == 400
    key, asked = {"Idempotency-Key": batch["id"]}, {**asked, "endpoint": COMPLETION}
    first, second = (post(site, "/v1/batches", asked, **key).json() for _ in range(2))
    assert first["id"] == second["id"] != batch["id"]
    other = post(site, "/v1/batches", {**asked, "completion_window": "1h"}, **key)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")
