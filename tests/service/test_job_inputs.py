"""What a request of any kind costs, and what a model refuses."""

import io
import struct
import wave

import pytest

from support.worker_rig import make_tokenizer
from tidemill.protocol.errors import ConfigError, InvalidRequest
from tidemill.protocol.messages import GenerateRequest, ModelCard
from tidemill.protocol.requests import EmbedRequest, Request, ScoreRequest, TranscribeRequest
from tidemill.service.audio_length import audio_seconds
from tidemill.service.job_inputs import most_job_tokens, prepare_job, validate_job

TOKENIZER = make_tokenizer()


def make_card(task: str) -> ModelCard:
    return ModelCard.model_validate(
        {
            "name": "m",
            "revision": "r",
            "tokenizer_digest": TOKENIZER.digest,
            "max_model_len": 8,
            "vocab_size": 100,
            "task": task,
            "embedding_size": 4,
        }
    )


def make_wav(seconds: float, rate: int = 8000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes(bytes(2 * int(seconds * rate)))
    return file.getvalue()


def test_the_length_of_wav_is_that_of_its_frames() -> None:
    assert audio_seconds(make_wav(12.5)) == 12.5


def test_the_length_of_flac_is_that_of_its_stream_info() -> None:
    # 44.1 kHz, two channels of 24 bits, 485,100 samples: eleven seconds.
    packed = 44_100 << 44 | 1 << 41 | 23 << 36 | 485_100
    info = bytes(10) + struct.pack(">Q", packed) + bytes(16)
    assert audio_seconds(b"fLaC" + bytes(4) + info) == 11.0


def test_the_length_of_anything_else_is_guessed_from_its_size() -> None:
    assert audio_seconds(b"ID3" + bytes(79_997)) == 10.0


def test_an_embed_job_costs_the_tokens_of_its_inputs_and_carries_them() -> None:
    request = EmbedRequest(model="m", inputs=("tide mill", (1, 2, 3)))
    prepared = prepare_job(request, TOKENIZER, make_card("embed"), b"")
    assert isinstance(prepared.request, EmbedRequest)
    assert prepared.request.inputs == ((1, 2), (1, 2, 3))
    assert prepared.request.tokenizer_digest == TOKENIZER.digest
    assert (prepared.prompt.cost, prepared.prompt.routing_key) == (5, b"")
    assert most_job_tokens(prepared.request, make_card("embed")) == 5


def test_a_score_job_of_a_cross_encoder_costs_each_pair() -> None:
    request = ScoreRequest(model="m", query="tide mill", documents=("water", "grain wheel mill"))
    assert prepare_job(request, TOKENIZER, make_card("score"), b"").prompt.cost == 3 + 5
    # A model for embeddings reads the query once.
    assert prepare_job(request, TOKENIZER, make_card("embed"), b"").prompt.cost == 2 + 1 + 3


def test_a_transcription_costs_the_windows_of_its_audio() -> None:
    request = TranscribeRequest(model="m", audio=make_wav(31.0, rate=4000))
    assert prepare_job(request, None, make_card("transcribe"), b"").prompt.cost == 2 * 1500


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest(model="m", prompt_ids=(1,)),
        ScoreRequest(model="m", query="a", documents=("b",)),
        TranscribeRequest(model="m", audio=b"x"),
    ],
    ids=lambda request: request.kind,
)
def test_a_model_for_another_kind_is_refused_by_name(request_: Request) -> None:
    task = "transcribe" if request_.kind == "score" else "embed"
    with pytest.raises(InvalidRequest, match=f"model for {task}.*kind {request_.kind}") as refused:
        validate_job(request_, make_card(task))
    assert refused.value.field == "model"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (EmbedRequest(model="m", inputs=((1,), (1,) * 9)), "inputs.1"),
        (EmbedRequest(model="m", inputs=((100,),)), "inputs.0"),
        (EmbedRequest(model="m", inputs=((1,), ())), "inputs.1"),
        (EmbedRequest(model="m", inputs=("tide " * 9,)), "inputs.0"),
        (EmbedRequest(model="m", inputs=((1,),), dimensions=5), "dimensions"),
        (EmbedRequest(model="m", inputs=((1,),), tokenizer_digest="d"), "tokenizer_digest"),
        (ScoreRequest(model="m", query="tide", documents=("mill " * 9,)), "documents.0"),
    ],
)
def test_what_the_model_cannot_read_is_refused_naming_the_field(
    request_: Request, field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        prepare_job(request_, TOKENIZER, make_card("embed"), b"")
    assert refused.value.field == field


def test_inputs_that_are_too_long_are_cut_if_the_caller_asks_for_it() -> None:
    request = EmbedRequest(model="m", inputs=("tide " * 9, (2,) * 9), truncate=True)
    prepared = prepare_job(request, TOKENIZER, make_card("embed"), b"").request
    assert isinstance(prepared, EmbedRequest)
    assert prepared.inputs == ((1,) * 8, (2,) * 8)


def test_text_without_a_tokenizer_is_refused_with_the_extra_that_brings_one() -> None:
    request = EmbedRequest(model="m", inputs=("tide",))
    with pytest.raises(ConfigError, match="tokenizer"):
        prepare_job(request, None, make_card("embed"), b"")


def test_more_vectors_than_a_result_can_hold_are_refused_before_anything_is_queued() -> None:
    card = make_card("embed").model_copy(update={"embedding_size": 4096})
    with pytest.raises(InvalidRequest) as refused:
        validate_job(EmbedRequest(model="m", inputs=("tide",) * 1021), card)
    assert refused.value.field == "inputs" and "1020 at most" in refused.value.fix
