"""A transcription whose workers die in the middle: the next one says the rest, word for word."""

import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from support.actors import Actor
from support.crash_stage import CrashStage
from support.shard import KEYS, read_log
from support.tiny_whisper import save_tiny_whisper
from support.wait import wait_until
from tidemill import Producer, TranscribeSpec
from tidemill.outcomes import transcription_of
from tidemill.protocol.requests import TranscribeRequest
from tidemill.service.runtime import CRASH_STATUS
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.speech.audio import SAMPLE_RATE, decode_audio
from tidemill_gpuworker.speech.engine import SpeechEngine
from tidemill_gpuworker.speech.job import Audio, SpeechJob
from tidemill_gpuworker.speech.model import SpeechModel
from tidemill_gpuworker.speech.vocabulary import read_vocabulary

# Each worker loads its libraries and a model, and keeps its lease for ten seconds.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SECONDS = 120
PATIENCE_SECONDS = 300
#: Where the workers die: behind the second window of five, and in front of the fourth.
CRASHES = ("worker.after_append:2", "worker.before_append:2")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_whisper(tmp_path_factory.mktemp("whisper"))


def make_audio() -> bytes:
    """Half a second of another tone every seven seconds, as a file."""
    samples = np.zeros(SAMPLE_RATE * SECONDS, dtype=np.float32)
    tones = np.random.default_rng(2).integers(200, 3000, SECONDS // 7 + 1)
    times = np.arange(SAMPLE_RATE // 2) / SAMPLE_RATE
    for number, tone in enumerate(tones):
        start = 7 * number * SAMPLE_RATE
        samples[start : start + len(times)] = 0.5 * np.sin(2 * np.pi * tone * times)
    file = io.BytesIO()
    soundfile.write(file, samples, SAMPLE_RATE, format="FLAC")
    return file.getvalue()


def transcribe_at_once(model_dir: Path, job_id: str, audio: bytes) -> tuple[SpeechJob, str]:
    """What an engine makes of the job that nobody interrupts."""
    tokenizer = Tokenizer.from_directory(model_dir)
    model = SpeechModel(model_dir, device=torch.device("cpu"), dtype=torch.float32)
    engine = SpeechEngine(model, read_vocabulary(model_dir, tokenizer), tokenizer, 1)
    samples = decode_audio(audio)
    request = TranscribeRequest(model="tiny", audio=audio, timestamps="segment")
    features = Audio(model.features(samples), len(samples) * 100 // SAMPLE_RATE)
    job = SpeechJob(job_id, request, features)
    engine.add(job)
    text = ""
    while engine.has_work:
        text += "".join(output.text for output in engine.step())
    return job, text


def start_worker(stage: CrashStage, model_dir: Path, crash_at: str = "") -> Actor:
    arguments = ["--redis-url", stage.url, "--model", str(model_dir)]
    arguments += ["--served-model-name", "tiny", "--device", "cpu", "--dtype", "float32"]
    arguments += ["--num-threads", "1"]
    return stage.troupe.start(
        "tidemill_gpuworker.__main__:main", arguments, crash_at=crash_at, name="worker"
    )


def wait_for_crash(stage: CrashStage, worker: Actor) -> None:
    wait_until(lambda: not worker.is_running, PATIENCE_SECONDS, "the worker dies")
    assert worker.wait() == CRASH_STATUS, stage.logs()


def test_a_transcription_survives_its_workers_with_the_same_text(
    stage: CrashStage, model_dir: Path
) -> None:
    audio = make_audio()
    # The lease that workers renew, at their own pace.
    stage.leader(lease_seconds=10.0)
    first = start_worker(stage, model_dir, CRASHES[0])
    wait_until(
        lambda: stage.client.zscore(KEYS.models, "tiny"), PATIENCE_SECONDS, "the model is served"
    )
    with Producer(stage.url) as producer:
        [job] = producer.submit_many([TranscribeSpec(audio, model="tiny", timestamps="segment")])
        assert not isinstance(job, Exception)
        wait_for_crash(stage, first)
        begun = len(read_log(stage.client, job.id).ids)
        wait_for_crash(stage, start_worker(stage, model_dir, CRASHES[1]))
        gone_on = len(read_log(stage.client, job.id).ids)
        start_worker(stage, model_dir)
        text = "".join(chunk.text for chunk in job.stream(timeout=PATIENCE_SECONDS))
        result = job.result(timeout=PATIENCE_SECONDS)

    expected, expected_text = transcribe_at_once(model_dir, job.id, audio)
    log = read_log(stage.client, job.id)
    assert 0 < begun < gone_on < len(log.ids)
    assert log.ids == list(result.token_ids) == expected.output_ids
    # The last entry is the end of the job.
    assert len(set(log.writers[:-1])) >= 3
    assert text == result.text == expected_text
    spoken = [(each.text, each.start, each.end) for each in transcription_of(result).segments]
    assert spoken == [(each.text, each.start, each.end) for each in expected.segments]
    assert expected.num_windows == 5 and len(spoken) >= 5
