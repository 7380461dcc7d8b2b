"""Speech through broker, scheduler and worker, with a small real model, against transformers."""

import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers

from support.model_wheels import WHISPER_TINY
from support.processes import sandbox
from support.small_stacks import small_stack
from support.wait import wait_until
from tidemill import InvalidRequest, JobFailed, Producer, TranscribeSpec, Transcription
from tidemill.cli.stack import Stack
from tidemill_gpuworker.speech.audio import Samples, decode_audio
from tidemill_gpuworker.speech.ctranslate2 import convert

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

CLIP = Path(__file__).parents[3] / "shared" / "data" / "audio" / "jfk.flac"
SENTENCE = (
    "And so my fellow Americans ask not what your country can do for you"
    " ask what you can do for your country"
)


def plain(text: str) -> str:
    """The words alone."""
    return " ".join("".join(c for c in text if c.isalpha() or c == " ").split())


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whisper")
    convert(WHISPER_TINY.directory(), directory)
    return directory


@pytest.fixture(scope="module")
def samples() -> Samples:
    """The clip [count] at 16 kHz."""
    if not CLIP.is_file():
        pytest.skip(f"{CLIP.name}, the recording of a known sentence, is not here")
    return decode_audio(CLIP.read_bytes())


def as_file(samples: Samples, form: str = "FLAC") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format=form)
    return file.getvalue()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the stack has its data, the blob store too."""
    return tmp_path_factory.mktemp("stack")


@pytest.fixture(scope="module")
def stack(model_dir: Path, data_dir: Path) -> Iterator[Stack]:
    with small_stack(model_dir, data_dir) as running:
        yield running


@pytest.fixture
def producer(stack: Stack) -> Iterator[Producer]:
    with Producer(stack.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def expected(model_dir: Path, samples: Samples) -> dict[bool, list[int]]:
    """What transformers generates, without and with timestamps."""
    model = transformers.WhisperForConditionalGeneration.from_pretrained(
        model_dir, dtype=torch.float32
    ).eval()
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(model_dir)
    features = extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features
    found: dict[bool, list[int]] = {}
    for timestamps in (False, True):
        output: Any = model.generate(features, return_timestamps=timestamps)
        sequences = output["sequences"] if isinstance(output, dict) else output
        found[timestamps] = sequences[0].tolist()
    return found


@pytest.mark.parametrize("timestamps", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_tokens_are_those_of_transformers(
    producer: Producer, samples: Samples, expected: dict[bool, list[int]], timestamps: bool
) -> None:
    kind = "segment" if timestamps else "none"
    [job] = producer.submit_many([TranscribeSpec(as_file(samples), timestamps=kind)])
    assert not isinstance(job, Exception)
    ids = job.result(timeout=300).token_ids
    opening = 1 if timestamps else 2
    assert list(ids[opening:-1]) == expected[timestamps]


def test_a_known_sentence_is_understood_with_its_times(
    producer: Producer, samples: Samples
) -> None:
    answer = producer.transcribe(as_file(samples), timestamps="word", timeout=300)
    assert plain(answer.text).lower() == SENTENCE.lower()
    assert (answer.language, answer.seconds) == ("en", 11.0)
    words = [word for segment in answer.segments for word in segment.words]
    assert [plain(word.text) for word in words] == plain(answer.text).split()
    first = {plain(word.text): word for word in reversed(words)}
    # What the tests of Whisper's own code ask of this recording.
    assert first["Americans"].start <= 1.8 <= first["Americans"].end
    # "what" is said between 5.3 and 5.7 s, after a pause that counts to it.
    assert 5.3 < first["what"].end < 6.0 and words[-1].end <= 11.0
    assert all(word.start <= word.end for word in words)


def test_long_audio_comes_in_windows_that_can_be_followed_and_survives_its_worker(
    stack: Stack, producer: Producer, samples: Samples
) -> None:
    quiet = np.zeros(16_000 * 20, dtype=np.float32)
    audio = as_file(np.concatenate([samples, quiet, samples]), "OGG")
    [job] = producer.submit_many([TranscribeSpec(audio)])
    assert not isinstance(job, Exception)
    wait_until(lambda: producer.job_status(job.id).num_tokens > 0, 300)
    [worker] = stack.pids("worker")
    os.kill(worker, signal.SIGKILL)
    text = "".join(chunk.text for chunk in job.stream(timeout=300))
    result = job.result(timeout=300)
    answer = Transcription.of(result)
    assert text.strip() == answer.text
    assert plain(answer.text).lower() == f"{SENTENCE} {SENTENCE}".lower()
    times = [(round(segment.start), round(segment.end)) for segment in answer.segments]
    assert times == [(0, 8), (8, 11), (31, 39), (39, 42)]


def test_bad_audio_fails_its_own_job_alone_and_large_audio_is_refused(
    producer: Producer, samples: Samples
) -> None:
    good, bad = producer.submit_many(
        [TranscribeSpec(as_file(samples, "OGG")), TranscribeSpec(b"no audio at all")]
    )
    assert not isinstance(good, Exception) and not isinstance(bad, Exception)
    with pytest.raises(JobFailed, match="cannot be decoded"):
        bad.result(timeout=300)
    assert "country" in good.result(timeout=300).text
    with pytest.raises(InvalidRequest, match="262144"):
        TranscribeSpec(CLIP)
    with pytest.raises(InvalidRequest, match="model for transcribe"):
        producer.embed("tide")


def test_a_large_file_is_read_from_the_store_that_both_sides_know(
    stack: Stack, data_dir: Path, samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEMILL_DATA_DIR", str(data_dir))
    with Producer(stack.url, timeout=60) as producer:
        assert plain(producer.transcribe(CLIP, timeout=300).text).lower() == SENTENCE.lower()
    monkeypatch.setenv("TIDEMILL_DATA_DIR", str(tmp_path))
    with (
        Producer(stack.url, timeout=60) as producer,
        pytest.raises(InvalidRequest, match="read no blob store"),
    ):
        producer.transcribe(CLIP)


def test_the_command_prints_what_is_said_as_text_with_times_or_as_json(
    stack: Stack, samples: Samples, tmp_path: Path
) -> None:
    (tmp_path / "clip.ogg").write_bytes(as_file(samples, "OGG"))
    with sandbox(tmp_path, TIDEMILL_REDIS_URL=stack.url) as box:
        file = str(tmp_path / "clip.ogg")
        text = box.run("transcribe", file)
        timed = box.run("transcribe", file, "--timestamps", "word")
        as_json = box.run("transcribe", file, "--json", "--language", "en")
        refused = box.run("transcribe", str(CLIP))
    assert plain(text.stdout).lower() == SENTENCE.lower()
    first, *words = timed.stdout.splitlines()
    assert first.startswith("[   0.00 - ") and plain(first) in SENTENCE
    assert len(words) >= 20
    assert json.loads(as_json.stdout)["seconds"] == 11.0
    assert refused.status == 1 and "it has more than 262144 bytes" in refused.error
