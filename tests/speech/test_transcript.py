"""What the tokens of a window say, audio files, and jobs that change hands."""

import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from support.tiny_whisper import IDS, save_tiny_whisper
from tidemill.protocol.errors import DamagedModel, InvalidRequest, UnsupportedModel
from tidemill.protocol.requests import TranscribeRequest
from tidemill.service.tokenizer import Tokenizer
from tidemill_gpuworker.speech.audio import decode_audio, resample
from tidemill_gpuworker.speech.ctranslate2 import read_tensors
from tidemill_gpuworker.speech.engine import SpeechEngine
from tidemill_gpuworker.speech.job import Audio, SpeechJob
from tidemill_gpuworker.speech.model import SpeechModel
from tidemill_gpuworker.speech.scribe import Scribe
from tidemill_gpuworker.speech.transcript import Piece, read_window
from tidemill_gpuworker.speech.vocabulary import Vocabulary, read_vocabulary


class Speaker:
    """A small random model, its engine, and the jobs that it is given."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = Tokenizer.from_directory(directory)
        self.vocabulary: Vocabulary = read_vocabulary(directory, self.tokenizer)
        self.model = SpeechModel(directory, device=torch.device("cpu"), dtype=torch.float32)
        noise = np.random.default_rng(3).standard_normal(16_000 * 70).astype(np.float32)
        self.audio = Audio(self.model.features(noise), 7000)

    def job(
        self, name: str = "a", written: list[int] | None = None, **options: object
    ) -> SpeechJob:
        """A job behind what an earlier attempt has written."""
        fields = {"model": "m", "audio": b"-", "language": "en", **options}
        job = SpeechJob(name, TranscribeRequest.model_validate(fields), self.audio)
        job.output_ids = list(written or [])
        Scribe(self.model, self.vocabulary, self.tokenizer).replay(job, job.output_ids)
        return job

    def run(self, *jobs: SpeechJob) -> dict[str, list[tuple[int, ...]]]:
        """What each job's windows publish."""
        engine = SpeechEngine(self.model, self.vocabulary, self.tokenizer, max_num_seqs=2)
        for job in jobs:
            engine.add(job)
        told: dict[str, list[tuple[int, ...]]] = {job.seq_id: [] for job in jobs}
        while engine.has_work:
            for output in engine.step():
                told[output.seq.seq_id].append(output.new_ids)
        return told


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Speaker:
    return Speaker(save_tiny_whisper(tmp_path_factory.mktemp("whisper")))


def time_id(seconds: float) -> int:
    return IDS[f"<|{seconds:.2f}|>"]


@pytest.mark.parametrize(
    ("ids", "pieces", "num_frames"),
    [
        # Two whole segments and the start of a third: the next window begins there.
        (
            [time_id(0), 1, time_id(2), time_id(2), 2, time_id(5), time_id(5), 3],
            [(10.0, 12.0), (12.0, 15.0)],
            500,
        ),
        # The last segment ends alone: there is no more speech in this window.
        (
            [time_id(0), 1, time_id(2), time_id(2.5), 2, time_id(5)],
            [(10.0, 12.0), (12.5, 15.0)],
            3000,
        ),
        # No pair of timestamps: all of it is one segment, up to the last time.
        ([time_id(0), 1, 2, time_id(4)], [(10.0, 14.0)], 3000),
        ([1, 2], [(10.0, 40.0)], 3000),
        ([], [(10.0, 40.0)], 3000),
        # A pair at zero must not bring the same window again.
        ([time_id(0), time_id(0), 1], [(10.0, 10.0)], 3000),
    ],
)
def test_a_window_is_cut_at_its_timestamps(
    speaker: Speaker, ids: list[int], pieces: list[tuple[float, float]], num_frames: int
) -> None:
    found = read_window(ids, 1000, 3000, speaker.vocabulary)
    assert [(piece.start, piece.end) for piece in found.pieces] == pieces
    assert found.num_frames == num_frames


def test_the_tokens_of_a_segment_include_its_timestamps(speaker: Speaker) -> None:
    ids = [time_id(0), 1, time_id(2), time_id(2), 2, time_id(3)]
    first = read_window(ids, 0, 3000, speaker.vocabulary).pieces[0]
    assert first == Piece(0.0, 2.0, (time_id(0), 1, time_id(2)))


def test_a_job_reads_all_of_its_audio_alone_or_beside_others(speaker: Speaker) -> None:
    alone = speaker.run(speaker.job())["a"]
    assert len(alone) >= 3
    beside = speaker.run(speaker.job("b", task="translate"), speaker.job(), speaker.job("c"))
    assert beside["a"] == alone
    job = speaker.job()
    speaker.run(job)
    assert job.is_done and job.outcome().transcript.seconds == 70.0  # type: ignore[union-attr]


def test_a_job_that_is_taken_over_goes_on_as_if_nothing_had_happened(speaker: Speaker) -> None:
    job = speaker.job()
    windows = speaker.run(job)["a"]
    log = [token_id for window in windows for token_id in window]
    for count in range(len(windows) + 1):
        written = [token_id for window in windows[:count] for token_id in window]
        resumed = speaker.job(written=written)
        speaker.run(resumed)
        assert resumed.output_ids == log
        assert [s.text for s in resumed.segments] == [s.text for s in job.segments]


def test_a_temperature_near_zero_is_greedy(speaker: Speaker) -> None:
    [coldest, *_] = speaker.run(speaker.job(temperature=1e-300))["a"]
    [cold, *_] = speaker.run(speaker.job(temperature=9e-6))["a"]
    assert coldest == cold and coldest


def test_a_window_that_was_told_in_part_is_told_to_its_end(speaker: Speaker) -> None:
    [first, *_] = speaker.run(speaker.job(temperature=0.5))["a"]
    resumed = speaker.job(written=list(first[:9]), temperature=0.5)
    [rest, *_] = speaker.run(resumed)["a"]
    # The same tokens: each is drawn by the job, the window and its place.
    assert first[:9] + rest == first


def test_words_lie_in_order_inside_the_audio(speaker: Speaker) -> None:
    job = speaker.job(timestamps="word")
    speaker.run(job)
    words = [word for segment in job.segments for word in segment.words]
    assert words
    for segment in job.segments:
        assert "".join(word.text for word in segment.words) == segment.text
        times = [t for word in segment.words for t in (word.start, word.end)]
        assert times == sorted(times) and 0.0 <= times[0] <= times[-1] <= 70.02


def test_the_language_is_found_by_the_model_and_one_it_does_not_know_is_refused(
    speaker: Speaker,
) -> None:
    job = speaker.job(language=None)
    speaker.run(job)
    assert job.language in ("en", "de")
    with pytest.raises(InvalidRequest, match="'fr'"):
        speaker.vocabulary.check_language("fr", "transcribe")


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "MP3"])
def test_files_of_many_kinds_are_decoded_to_one_channel_of_16_khz(form: str) -> None:
    times = np.arange(44_100) / 44_100
    tone = 0.5 * np.sin(2 * np.pi * 440 * times)
    file = io.BytesIO()
    soundfile.write(file, np.stack((tone, tone), axis=1), 44_100, format=form)
    samples = decode_audio(file.getvalue())
    assert samples.dtype == np.float32 and abs(len(samples) - 16_000) < 1200
    spectrum = np.abs(np.fft.rfft(samples[:16_000], 16_000))
    assert spectrum.argmax() == 440


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000])
def test_a_tone_keeps_its_shape_at_another_rate(rate: int) -> None:
    times, wanted = np.arange(rate) / rate, np.arange(16_000) / 16_000
    tone = np.sin(2 * np.pi * 1000 * times).astype(np.float32)
    found = resample(tone, rate)
    assert len(found) == 16_000
    middle = slice(200, -200)
    error = found[middle] - np.sin(2 * np.pi * 1000 * wanted)[middle]
    assert np.abs(error).max() < 2e-3


def test_what_would_fold_into_the_band_is_filtered_out() -> None:
    tone = np.sin(2 * np.pi * 15_000 * np.arange(48_000) / 48_000).astype(np.float32)
    assert np.abs(resample(tone, 48_000)[200:-200]).max() < 1e-3


def test_what_is_no_audio_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot be decoded"):
        decode_audio(b"RIFF but nothing else")


def test_silence_of_many_hours_in_a_small_file_is_refused() -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(8000 * 9000, dtype=np.int16), 8000, format="FLAC")
    assert len(file.getvalue()) < 256 * 1024
    with pytest.raises(InvalidRequest, match="9000 s"):
        decode_audio(file.getvalue())


def test_a_checkpoint_that_is_cut_off_or_of_another_kind_is_refused() -> None:
    name = b"TransformerSpec\0"
    header = b"\6\0\0\0" + len(name).to_bytes(2, "little") + name
    with pytest.raises(UnsupportedModel, match="TransformerSpec"):
        read_tensors(header + bytes(8))
    with pytest.raises(DamagedModel, match="ends at byte"):
        read_tensors(header[:-3])


def test_audio_without_a_sample_has_an_empty_transcript(speaker: Speaker) -> None:
    job = speaker.job()
    job.audio = Audio(speaker.model.features(np.zeros(0, dtype=np.float32)), 0)
    assert speaker.run(job)["a"] == [()]
    transcript = job.outcome().transcript
    assert transcript is not None and (transcript.seconds, transcript.segments) == (0.0, ())


def test_a_job_that_is_cancelled_gives_its_slot_to_others(speaker: Speaker) -> None:
    engine = SpeechEngine(speaker.model, speaker.vocabulary, speaker.tokenizer, max_num_seqs=2)
    kept = speaker.job("kept")
    for job in (speaker.job("gone"), kept, speaker.job("next")):
        engine.add(job)
    engine.step()
    engine.step()
    assert engine.abort("gone") is not None and engine.abort("gone") is None
    while engine.has_work:
        engine.step()
    alone = speaker.job("kept")
    speaker.run(alone)
    # Its window had to move to the slot that became free.
    assert kept.output_ids == alone.output_ids
