"""Jobs that nobody waits for: submitted, looked at, followed, fetched and cancelled over HTTP."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from gateway.client import post
from gateway.conftest import MODEL, Site
from gateway.document import check
from gateway.speech import LONG, SHORT, compressed, save_sure_whisper, stored_speech
from gateway.workers import worker
from support.tiny_encoders import save_bert
from support.wait import wait_until
from tidemill import Producer

ENDLESS: dict[str, Any] = {"prompt": "hello", "max_tokens": 1000, "ignore_eos": True}


def submit(site: Site, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    answer = post(site, "/v1/jobs", {"model": MODEL, **body}, **(headers or {}))
    assert answer.status_code == 202, answer.text
    told: dict[str, Any] = answer.json()
    check(site.url, "/v1/jobs", told, status="202")
    return told


def get(site: Site, path: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{site.url}/v1/jobs/{path}", headers=headers, timeout=60)


def get_list(site: Site, query: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{site.url}/v1/jobs{query}", headers=headers, timeout=60)


def result_of(site: Site, job_id: str) -> dict[str, Any]:
    answer = get(site, f"{job_id}/result?wait=60")
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    check(site.url, "/v1/jobs/{job_id}/result", told, method="get")
    return told


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream: id, kind and data."""
    assert answer.status_code == 200, answer.text
    found = []
    for block in answer.text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        found.append({"id": lines["id"], "kind": lines["event"], **json.loads(lines["data"])})
    return found


def test_a_job_ends_without_anybody_waiting_and_its_result_is_that_of_the_sdk(
    site: Site, producer: Producer
) -> None:
    job = submit(site, prompt="hello", max_tokens=6, temperature=0, logprobs=1)
    assert job["object"] == "job" and job["is_new"] and job["model"] == MODEL
    told = result_of(site, job["id"])
    true = producer.result(job["id"])
    [choice] = told["choices"]
    assert (choice["text"], choice["token_ids"]) == (true.text, list(true.token_ids))
    assert choice["finish_reason"] == true.finish_reason and told["status"] == "done"
    assert true.logprobs is not None
    assert [each["logprob"] for each in choice["logprobs"]] == [e.logprob for e in true.logprobs]
    assert told["usage"]["completion_tokens"] == 6
    status = get(site, job["id"]).json()
    check(site.url, "/v1/jobs/{job_id}", status, method="get")
    assert status["status"] == "done" and status["num_tokens"] == 6
    assert status["created_at"] <= status["started_at"] <= status["ended_at"]


def test_a_conversation_and_several_outputs_are_jobs_too(site: Site) -> None:
    messages = [{"role": "user", "content": "hello"}]
    chat = submit(site, messages=messages, max_tokens=4, ignore_eos=True, n=2, seed=3)
    choices = result_of(site, chat["id"])["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert all(len(choice["token_ids"]) == 4 for choice in choices)


def test_a_stream_is_resumed_behind_any_event_and_says_when_nothing_follows(site: Site) -> None:
    job = submit(site, prompt="hello", max_tokens=40, ignore_eos=True)
    *tokens, end = events_of(get(site, f"{job['id']}/stream"))
    text = result_of(site, job["id"])["choices"][0]["text"]
    assert "".join(event["text"] for event in (*tokens, end)) == text
    assert end["kind"] == "end" and end["status"] == "done" and end["finish_reason"] == "length"
    assert end["usage"]["completion_tokens"] == 40
    for place in (0, len(tokens) // 2, len(tokens) - 1):
        rest = events_of(get(site, f"{job['id']}/stream", **{"Last-Event-ID": tokens[place]["id"]}))
        wanted = [*tokens[place + 1 :], end]
        assert "".join(each["text"] for each in rest) == "".join(each["text"] for each in wanted)
        assert rest[-1]["id"] == end["id"]
    by_count = events_of(get(site, f"{job['id']}/stream?after={tokens[0]['end']}"))
    assert sum(len(event["token_ids"]) for event in by_count) == 40 - tokens[0]["end"]
    assert get(site, f"{job['id']}/stream", **{"Last-Event-ID": end["id"]}).status_code == 204
    wrong = get(site, f"{job['id']}/stream", **{"Last-Event-ID": "yesterday"})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "after"


def test_a_job_outlives_those_who_follow_it_and_ends_when_it_is_cancelled(
    site: Site, producer: Producer
) -> None:
    job = submit(site, **ENDLESS)
    with httpx.stream("GET", f"{site.url}/v1/jobs/{job['id']}/stream", timeout=60) as answer:
        next(answer.iter_lines())
    status = get(site, job["id"]).json()["status"]
    assert status == "running"
    early = get(site, f"{job['id']}/result")
    assert early.status_code == 202
    check(site.url, "/v1/jobs/{job_id}/result", early.json(), method="get", status="202")
    cancelled = httpx.post(f"{site.url}/v1/jobs/{job['id']}/cancel").json()
    assert cancelled["status"] == "cancelled" and cancelled["id"] == job["id"]
    told = result_of(site, job["id"])
    assert told["status"] == "cancelled" and told["choices"][0]["token_ids"]
    [*_, end] = events_of(get(site, f"{job['id']}/stream"))
    assert (end["kind"], end["status"]) == ("end", "cancelled")
    again = httpx.delete(f"{site.url}/v1/jobs/{job['id']}")
    assert again.status_code == 200 and again.json()["status"] == "cancelled"
    assert producer.job_status(job["id"]).state == "cancelled"


def test_a_job_waits_for_its_time_and_its_key_finds_it_again(site: Site) -> None:
    key = {"Idempotency-Key": "later-1"}
    body = {"prompt": "hello", "delay": 3600, "max_retries": 1, "batch": "night", "priority": 4}
    first, second = submit(site, key, **body), submit(site, key, **body)
    assert first["id"] == second["id"] and first["is_new"] and not second["is_new"]
    status = get(site, first["id"]).json()
    assert status["status"] == "delayed" and status["ready_at"] > status["created_at"] + 3000
    assert (status["batch"], status["max_retries"], status["priority"]) == ("night", 1, 4)
    httpx.delete(f"{site.url}/v1/jobs/{first['id']}")


def test_jobs_are_listed_the_newest_first_and_only_to_their_tenant(site: Site) -> None:
    carol = {"X-Tidemill-Tenant": "carol"}

    def listed(query: str = "", tenant: str = "carol") -> dict[str, Any]:
        answer = get_list(site, query, **{"X-Tidemill-Tenant": tenant})
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        check(site.url, "/v1/jobs", told, method="get")
        return told

    assert listed() == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }
    made = [submit(site, carol, prompt="hello", delay=3600, batch="b") for _ in range(2)]
    note = {"of": "carol"}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "metadata": note}
    asked = post(site, "/v1/chat/completions", {"model": MODEL, **chat}, **carol).json()
    made.append({"id": asked["id"].removeprefix("chatcmpl-")})
    page = listed("?limit=2")
    assert [job["id"] for job in page["data"]] == [made[2]["id"], made[1]["id"]]
    assert page["data"][0]["metadata"] == note and page["data"][0]["status"] == "done"
    assert page["has_more"] and (page["first_id"], page["last_id"]) == (
        *(made[2]["id"], made[1]["id"]),
    )
    rest = listed(f"?after={page['last_id']}")
    assert [job["id"] for job in rest["data"]] == [made[0]["id"]] and not rest["has_more"]
    delayed = listed("?status=delayed&status=queued&batch=b")["data"]
    assert [job["id"] for job in delayed] == [made[1]["id"], made[0]["id"]]
    assert listed("?status=failed")["data"] == [] == listed(tenant="dave")["data"]
    for query in ("?limit=0", "?limit=101", "?status=tired", "?after=x", "?batch=a%20b"):
        wrong = get_list(site, query, **carol)
        name = query[1:].partition("=")[0]
        assert wrong.status_code == 400 and name in wrong.json()["error"]["param"], query
    for job in made[:2]:
        httpx.delete(f"{site.url}/v1/jobs/{job['id']}", headers=carol)


def test_a_job_keeps_its_metadata(site: Site) -> None:
    job = submit(site, prompt="hello", max_tokens=1, metadata={"a": "b"})
    assert job["metadata"] == {"a": "b"} == get(site, job["id"]).json()["metadata"]


def test_a_deadline_that_passed_is_told(site: Site) -> None:
    job = submit(site, prompt="hello", delay=0.2, deadline=0.25, max_tokens=1000, ignore_eos=True)
    told = result_of(site, job["id"])
    assert told["status"] == "expired" and told["error"]


@pytest.mark.parametrize("path", ["", "/result", "/stream", "/cancel"])
def test_jobs_of_others_are_not_found(site: Site, path: str) -> None:
    job = submit(site, {"X-Tidemill-Tenant": "alice"}, prompt="hello", max_tokens=1)
    ask = httpx.post if path == "/cancel" else httpx.get
    url = f"{site.url}/v1/jobs/{job['id']}{path}"
    others = ask(url, headers={"X-Tidemill-Tenant": "bob"})
    assert others.status_code == 404 and others.json()["error"]["code"] == "not_found"
    assert ask(url, headers={"X-Tidemill-Tenant": "alice"}).status_code < 300
    unknown = ask(f"{site.url}/v1/jobs/nothing{path}")
    assert unknown.status_code == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": "a", "kind": "dream"}, "kind"),
        ({"prompt": "a", "temperature": 9}, "temperature"),
        ({"prompt": "a", "delay": -1}, "delay"),
        ({"prompt": "a", "max_retries": 100000}, "max_retries"),
        ({"prompt": "a", "callback_url": "ftp://x"}, "callback_url"),
        ({"prompt": "a", "metadata": {"a": 1}}, "metadata"),
        ({"prompt": [10**6]}, "prompt"),
        ({"kind": "embed", "input": "a"}, "model"),
        ({"kind": "transcribe"}, "audio"),
        ({"kind": "transcribe", "audio": "%%%"}, "audio"),
        ({"kind": "score", "query": "a"}, "documents"),
    ],
)
def test_a_wrong_job_is_refused_by_its_field(
    site: Site, fields: dict[str, Any], param: str
) -> None:
    answer = post(site, "/v1/jobs", {"model": MODEL, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.fixture
def bert(site: Site, tmp_path: Path) -> Iterator[str]:
    with worker(site.stack.url, save_bert(tmp_path), "bert"):
        yield "bert"


def test_vectors_and_scores_are_jobs_too(site: Site, producer: Producer, bert: str) -> None:
    job = submit(site, kind="embed", model=bert, input=["tide", "mill"], dimensions=4)
    told = result_of(site, job["id"])
    true = producer.embed(["tide", "mill"], model=bert, dimensions=4)
    assert told["embeddings"] == [list(row) for row in true.vectors] and "choices" not in told
    job = submit(site, kind="score", model=bert, query="tide", documents=["mill", "tide"])
    scores = producer.score("tide", ["mill", "tide"], model=bert).scores
    assert result_of(site, job["id"])["scores"] == pytest.approx(list(scores), abs=1e-6)
    [end] = events_of(get(site, f"{job['id']}/stream"))
    assert (end["kind"], end["status"]) == ("end", "done")


def test_a_file_that_was_uploaded_before_is_transcribed(
    site: Site, tmp_path: Path, producer: Producer
) -> None:
    environ = {"TIDEMILL_DATA_DIR": str(site.data_dir)}
    with worker(site.stack.url, save_sure_whisper(tmp_path), "whisper", environ=environ):
        upload = httpx.post(
            f"{site.url}/v1/files", data={"purpose": "user_data"}, files={"file": ("a.wav", LONG)}
        ).json()
        job = submit(site, kind="transcribe", model="whisper", file_id=upload["id"])
        told = result_of(site, job["id"])
        assert told["transcript"]["seconds"] == 31.0
        true = producer.transcribe(compressed(), model="whisper")
        assert told["choices"][0]["text"].strip() == true.text
        starts = [segment["start"] for segment in told["transcript"]["segments"]]
        assert starts == [segment.start for segment in true.segments]
        sent = base64.b64encode(SHORT).decode()
        job = submit(site, kind="transcribe", model="whisper", audio=sent, timestamps="word")
        assert result_of(site, job["id"])["transcript"]["segments"][0]["words"]
        missing = post(
            site, "/v1/jobs", {"kind": "transcribe", "model": "whisper", "file_id": "file-none"}
        )
        assert missing.status_code == 404
    httpx.delete(f"{site.url}/v1/files/{upload['id']}")
    wait_until(lambda: not stored_speech(site.url), timeout=20)
