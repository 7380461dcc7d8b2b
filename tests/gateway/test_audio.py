"""Speech over HTTP: the transcripts of the SDK in all forms, files of all sizes."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from openai.types.audio import TranscriptionTextDoneEvent

from gateway.conftest import MODEL, Site
from gateway.document import check, document
from gateway.speech import LONG, SHORT, compressed, save_sure_whisper, stored_speech
from gateway.workers import worker
from openai import OpenAI
from support.wait import wait_until
from tidemill import Producer, Transcription
from tidemill.protocol.requests import MAX_AUDIO_BYTES, MAX_STORED_AUDIO_BYTES

PATH = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def whisper_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sure_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module", autouse=True)
def whisper(site: Site, whisper_dir: Path) -> Iterator[None]:
    """A model for speech whose worker reads the gateway's blob store."""
    environ = {"TIDEMILL_DATA_DIR": str(site.data_dir)}
    with worker(site.stack.url, whisper_dir, "whisper", environ=environ):
        yield


@pytest.fixture
def client(site: Site) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as openai:
        yield openai


@pytest.fixture(scope="module")
def truth(site: Site) -> Transcription:
    with Producer(site.stack.url, timeout=60) as producer:
        return producer.transcribe(SHORT, model="whisper", timestamps="word")


def send(site: Site, path: str = PATH, audio: bytes = SHORT, **fields: Any) -> httpx.Response:
    form = {"model": "whisper", **fields}
    files = {"file": ("talk.flac", audio)}
    answer = httpx.post(f"{site.url}{path}", data=form, files=files, timeout=60)
    if answer.status_code == 200 and answer.headers["content-type"] == "application/json":
        check(site.url, path, answer.json())
    return answer


def refusal(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_the_text_is_that_of_the_sdk(site: Site, client: OpenAI, producer: Producer) -> None:
    true = producer.transcribe(compressed(), model="whisper", timestamps="none")
    file = ("talk.flac", compressed())
    told = client.audio.transcriptions.create(model="whisper", file=file)
    assert told.text == true.text and told.text
    assert told.usage is not None and told.usage.type == "duration" and told.usage.seconds == 31
    plain = client.audio.transcriptions.create(model="whisper", file=file, response_format="text")
    assert plain == f"{true.text}\n"


def test_verbose_answers_have_segments_and_words(client: OpenAI, truth: Transcription) -> None:
    told = client.audio.transcriptions.create(
        model="whisper",
        file=("talk.flac", SHORT),
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert (told.text, told.language, told.duration) == (truth.text, truth.language, 2.0)
    assert told.segments is not None and told.words is not None
    found = [(each.start, each.end, each.text, each.avg_logprob) for each in told.segments]
    assert found == [(s.start, s.end, s.text, s.mean_logprob) for s in truth.segments] and found
    assert [each.id for each in told.segments] == list(range(len(found)))
    words = [word for segment in truth.segments for word in segment.words]
    spoken = [(word.word, word.start, word.end) for word in told.words]
    assert spoken == [(word.text.strip(), word.start, word.end) for word in words] and spoken
    # Word "w7" of the test's model is token 7.
    assert told.segments[0].tokens == [
        int(text) for text in re.findall(r"w(\d+)", told.segments[0].text)
    ]


def test_segments_and_words_come_as_far_as_they_are_asked_for(site: Site) -> None:
    def keys(*granularities: str) -> set[str]:
        fields: dict[str, Any] = {"timestamp_granularities[]": list(granularities)}
        told: dict[str, Any] = send(site, response_format="verbose_json", **fields).json()
        return {"segments", "words"} & told.keys()

    assert keys() == {"segments"}
    assert keys("word") == {"words"}
    assert keys("segment", "word") == {"segments", "words"}


def test_subtitles_have_the_segments_times(site: Site, truth: Transcription) -> None:
    srt = send(site, response_format="srt").text
    vtt = send(site, response_format="vtt").text
    assert vtt.startswith("WEBVTT\n\n")
    clock = r"(\d\d):(\d\d):(\d\d)%s(\d\d\d)"
    for text, point in ((srt, ","), (vtt, r"\.")):
        times = re.findall(rf"{clock % point} --> {clock % point}\n(.+)\n", text)
        starts = [seconds(*each[:4]) for each in times]
        assert starts == pytest.approx([segment.start for segment in truth.segments])
        ends = [seconds(*each[4:8]) for each in times]
        assert ends == pytest.approx([segment.end for segment in truth.segments])
        assert [each[8] for each in times] == [each.text.strip() for each in truth.segments]
    assert srt.startswith("1\n") and srt.count("-->") == len(truth.segments)


def seconds(hours: str, minutes: str, whole: str, thousandths: str) -> float:
    return int(hours) * 3600 + int(minutes) * 60 + int(whole) + int(thousandths) / 1000


def test_a_stream_tells_the_text_in_pieces_and_then_whole(
    client: OpenAI, producer: Producer
) -> None:
    stream = client.audio.transcriptions.create(
        model="whisper", file=("talk.wav", LONG), stream=True, temperature=0
    )
    *pieces, last = list(stream)
    assert len(pieces) == 2, "one for each window"
    assert isinstance(last, TranscriptionTextDoneEvent)
    joined = "".join(piece.delta for piece in pieces if piece.type == "transcript.text.delta")
    assert joined.strip() == last.text and not joined.startswith(" ")
    assert last.usage is not None and last.usage.input_tokens == 2 * 1500
    assert last.text == producer.transcribe(compressed(), model="whisper", timestamps="none").text


def test_options_reach_the_model(site: Site, producer: Producer) -> None:
    def both(**options: Any) -> tuple[str, str]:
        told = send(site, response_format="text", **options).text.strip()
        return told, producer.transcribe(SHORT, model="whisper", timestamps="none", **options).text

    for options in ({"language": "de"}, {"prompt": "w1 w2 w3"}):
        told, wanted = both(**options)
        assert told == wanted
    translated = send(site, "/v1/audio/translations", response_format="verbose_json").json()
    true = producer.transcribe(SHORT, model="whisper", task="translate")
    assert (translated["task"], translated["text"]) == ("translate", true.text)


def test_the_fields_may_follow_the_file(site: Site) -> None:
    parts = [
        ("file", "a.flac", SHORT),
        ("response_format", None, b"text"),
        ("model", None, b"whisper"),
    ]
    body = b""
    for name, filename, value in parts:
        more = f'; filename="{filename}"' if filename else ""
        head = f'--cut\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
        body += head.encode() + value + b"\r\n"
    answer = httpx.post(
        f"{site.url}{PATH}",
        content=body + b"--cut--\r\n",
        headers={"content-type": "multipart/form-data; boundary=cut"},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    assert answer.text == send(site, response_format="text").text


def test_a_file_that_fits_no_message_goes_through_the_blob_store(
    site: Site, producer: Producer
) -> None:
    assert len(LONG) > MAX_AUDIO_BYTES > len(SHORT)
    told = send(site, audio=LONG, response_format="verbose_json").json()
    small = compressed()
    assert len(small) < MAX_AUDIO_BYTES
    true = producer.transcribe(small, model="whisper")
    assert told["text"] == true.text and told["duration"] == 31.0
    # Nobody needs it any more.
    wait_until(lambda: not stored_speech(site.url), timeout=20)


def test_the_same_file_with_the_same_key_is_one_job(site: Site) -> None:
    def ask(audio: bytes) -> httpx.Response:
        return httpx.post(
            f"{site.url}{PATH}",
            data={"model": "whisper", "stream": "true"},
            files={"file": ("a.wav", audio)},
            headers={"Idempotency-Key": "speech-1"},
            timeout=60,
        )

    first, second = ask(LONG), ask(LONG)
    assert first.status_code == second.status_code == 200 and first.text == second.text
    assert refusal(ask(LONG[:-2] + b"ab"), 409)["code"] == "idempotency_conflict"
    wait_until(lambda: not stored_speech(site.url), timeout=20)


def test_a_large_file_needs_a_store_that_the_workers_share(
    site: Site, whisper_dir: Path, tmp_path: Path
) -> None:
    environ = {"TIDEMILL_BLOB_URL": str(tmp_path)}
    with worker(site.stack.url, whisper_dir, "apart", environ=environ):
        error = refusal(send(site, audio=LONG, model="apart"))
        assert error["param"] == "file" and "blob store" in error["message"]
        assert send(site, audio=SHORT, model="apart").status_code == 200
    wait_until(lambda: not stored_speech(site.url), timeout=20)


def test_a_file_of_more_than_25_mb_is_refused(site: Site) -> None:
    error = refusal(send(site, audio=bytes(MAX_STORED_AUDIO_BYTES + 1)), 413)
    assert error["param"] == "file" and str(MAX_STORED_AUDIO_BYTES) in error["message"]
    # One that says before how much will come is not read at all.
    error = refusal(send(site, audio=bytes(MAX_STORED_AUDIO_BYTES + (1 << 19))), 413)
    assert error["code"] == "request_too_large"
    assert not stored_speech(site.url)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "xml"}, "response_format"),
        ({"temperature": "2"}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"language": "English"}, "language"),
        ({"timestamp_granularities[]": ["word"]}, "timestamp_granularities"),
        (
            {"response_format": "verbose_json", "timestamp_granularities[]": ["letter"]},
            "timestamp_granularities.0",
        ),
        ({"response_format": "srt", "stream": "true"}, "response_format"),
        ({"prompt": "w1" * 3000}, "prompt"),
        ({"model": MODEL}, "model"),
        ({"audio": b""}, "file"),
    ],
)
def test_a_wrong_request_for_speech_names_its_field(
    site: Site, fields: dict[str, Any], param: str
) -> None:
    assert refusal(send(site, **fields))["param"] == param


def test_what_is_no_audio_and_what_is_no_form_is_told(site: Site) -> None:
    error = refusal(send(site, audio=b"no audio at all"))
    assert error["code"] == "job_failed" and "cannot be decoded: Format not" in error["message"]
    answer = httpx.post(f"{site.url}{PATH}", data={"model": "whisper"}, files={"other": b"x"})
    assert refusal(answer)["param"] == "file"
    assert refusal(httpx.post(f"{site.url}{PATH}", json={"file": "x"}))["param"] == "file"


def test_the_document_tells_the_form(site: Site) -> None:
    post = document(site.url)["paths"][PATH]["post"]
    body = post["requestBody"]["content"]["multipart/form-data"]
    assert {"file", "language", "timestamp_granularities[]"} <= body["schema"]["properties"].keys()
