"""Files, batches and models with OpenAI's client: python openai_batches.py BASE_URL MODEL"""

import asyncio
import json
import sys
import time

import openai

BASE_URL, MODEL = sys.argv[1:3]
client = openai.OpenAI(base_url=BASE_URL, api_key="none")
COUNTRIES = ("France", "Germany", "Italy")


def line(name: str, **body: object) -> bytes:
    request = {"method": "POST", "url": "/v1/chat/completions", "body": {"model": MODEL, **body}}
    return json.dumps({"custom_id": name, **request}).encode()


def models() -> None:
    listed = {model.id: model for model in client.models.list()}
    assert client.models.retrieve(MODEL) == listed[MODEL] and listed[MODEL].object == "model"


def files() -> None:
    content = b"one\ntwo\n"
    file = client.files.create(
        file=("notes.jsonl", content),
        purpose="user_data",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (file.filename, file.bytes, file.purpose) == ("notes.jsonl", 8, "user_data")
    assert client.files.wait_for_processing(file.id).status == "processed"
    assert client.files.retrieve(file.id) == file
    assert file in list(client.files.list(purpose="user_data"))
    assert client.files.content(file.id).read() == content
    with client.files.with_streaming_response.content(file.id) as streamed:
        assert list(streamed.iter_lines()) == ["one", "two"]
    assert client.files.delete(file.id).deleted


def batch() -> None:
    questions = [
        line(
            country,
            messages=[{"role": "user", "content": f"What is the capital of {country}?"}],
            temperature=0,
            max_tokens=16,
        )
        for country in COUNTRIES
    ]
    wrong = line("wrong", messages=[], max_tokens=16)
    file = client.files.create(file=("in.jsonl", b"\n".join([*questions, wrong])), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"of": "capitals"},
    )
    ended = wait_for(made.id)
    assert ended.status == "completed" and ended.metadata == {"of": "capitals"}
    counts = ended.request_counts
    assert (counts.total, counts.completed, counts.failed) == (4, 3, 1)
    told = [json.loads(row) for row in client.files.content(ended.output_file_id).text.splitlines()]
    answers = {each["custom_id"]: each["response"]["body"] for each in told}
    assert set(answers) == set(COUNTRIES)
    assert "Paris" in answers["France"]["choices"][0]["message"]["content"]
    [refused] = client.files.content(ended.error_file_id).text.splitlines()
    assert json.loads(refused)["custom_id"] == "wrong"
    assert ended.id in [each.id for each in client.batches.list(limit=1)]


def wait_for(batch_id: str) -> object:
    deadline = time.monotonic() + 90
    while (batch := client.batches.retrieve(batch_id)).status not in ("completed", "failed"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.5)
    return batch


def cancelled_batch() -> None:
    endless = line("a", messages=[{"role": "user", "content": "Tell a tale."}], ignore_eos=True)
    file = client.files.create(file=("in.jsonl", endless), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    assert client.batches.cancel(made.id).status in ("cancelling", "cancelled")


async def asynchronous() -> None:
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key="none") as other:
        assert MODEL in [model.id async for model in other.models.list()]
        assert [batch.object async for batch in other.batches.list(limit=1)].count("batch") >= 2


for step in (models, files, batch, cancelled_batch):
    step()
asyncio.run(asynchronous())
ran = ["models", "files", "batches"]
print(json.dumps({"client": "openai", "version": openai.__version__, "ran": ran}))
