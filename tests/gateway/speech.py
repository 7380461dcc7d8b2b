"""Files of audio, and a model that hears something in them."""

import io
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import soundfile
import torch
import transformers

from support.tiny_whisper import save_tiny_whisper


def noise(seconds: float, form: str, rate: int, loudness: float) -> bytes:
    """The content of a file of noise."""
    samples = np.random.default_rng(7).normal(0, loudness, round(seconds * rate))
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form)
    return file.getvalue()


SHORT = noise(2.0, "FLAC", 16_000, 0.05)
#: Two windows, and more than fits into a message; so quiet that it can be compressed well.
LONG = noise(31.0, "WAV", 8_000, 0.0002)


def save_sure_whisper(directory: Path) -> Path:
    """Write a small random model."""
    save_tiny_whisper(directory)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(directory)
    with torch.no_grad():
        # So sure of itself that no window is decoded again by chance.
        model.model.decoder.layer_norm.weight *= 30
    model.save_pretrained(directory)
    return directory


def compressed() -> bytes:
    """The samples of the long file, small enough for a message."""
    samples, rate = soundfile.read(io.BytesIO(LONG), dtype="int16")
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="FLAC")
    return file.getvalue()


def stored_speech(url: str) -> list[Any]:
    """The files of audio that a gateway's store holds."""
    told = httpx.get(f"{url}/v1/files", params={"purpose": "user_data"}).json()
    found: list[Any] = told["data"]
    return found
