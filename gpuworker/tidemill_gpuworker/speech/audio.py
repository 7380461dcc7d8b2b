"""From the bytes of an audio file to samples: one channel, 16,000 a second."""

import io
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tidemill.protocol.errors import ConfigError, InvalidRequest

SAMPLE_RATE = 16_000
#: Compressed silence of a few kilobytes could fill the memory.
MAX_SECONDS = 3600
#: Zero crossings on either side of the resampling filter, and the share of the band that it keeps.
_FILTER_ZEROS = 16
_ROLL_OFF = 0.95

Samples = NDArray[np.float32]


def decode_audio(data: bytes) -> Samples:
    """Return the samples [count] of a WAV, FLAC, Ogg, MP3 or other file that libsndfile reads.

    Raises ``InvalidRequest`` if it is none or too long, ``ConfigError`` without the audio extra.
    """
    try:
        import soundfile  # an optional dependency
    except ImportError as error:
        raise ConfigError(
            "speech needs the package soundfile", fix='Install "tidemill[audio]".'
        ) from error
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_length(file.frames / file.samplerate)
            channels: Any = file.read(dtype="float32", always_2d=True)
            rate = int(file.samplerate)
    except (soundfile.SoundFileError, ZeroDivisionError) as error:
        raise InvalidRequest(
            f"audio: it cannot be decoded: {_reason(error)}",
            field="audio",
            fix="Send a whole WAV, FLAC, MP3 or Ogg file.",
        ) from error
    return resample(channels.mean(axis=1), rate)


def _reason(error: Exception) -> str:
    # Its message begins with the file, which here is an object in memory.
    return str(getattr(error, "error_string", error)).rstrip(".")


def resample(samples: Samples, rate: int) -> Samples:
    """Return samples at 16,000 a second.

    A windowed sinc, evaluated for each of the phases that repeat (J. O. Smith, Digital Audio
    Resampling).
    """
    if rate == SAMPLE_RATE or not len(samples):
        return np.ascontiguousarray(samples, dtype=np.float32)
    step = math.gcd(rate, SAMPLE_RATE)
    old, new = rate // step, SAMPLE_RATE // step
    kernel, width = _kernels(old, new)
    length = math.ceil(len(samples) * new / old)
    padded = functional.pad(torch.from_numpy(np.ascontiguousarray(samples)), (width, width + old))
    phases = functional.conv1d(padded[None, None], kernel[:, None], stride=old)
    flat: Samples = phases[0].T.reshape(-1)[:length].numpy()
    return flat


def _kernels(old: int, new: int) -> tuple[torch.Tensor, int]:
    """Return a filter [new, taps] for each phase, and how far it reaches to the left."""
    cutoff = min(old, new) * _ROLL_OFF
    width = math.ceil(_FILTER_ZEROS * old / cutoff)
    taps = torch.arange(-width, width + old, dtype=torch.float64)[None] / old
    times = (taps - torch.arange(new, dtype=torch.float64)[:, None] / new) * cutoff
    times = times.clamp(-_FILTER_ZEROS, _FILTER_ZEROS)
    window = torch.cos(times * math.pi / _FILTER_ZEROS / 2) ** 2
    return (torch.sinc(times) * window * (cutoff / old)).float(), width


def _check_length(seconds: float) -> None:
    if seconds > MAX_SECONDS:
        raise InvalidRequest(
            f"audio: {seconds:.0f} s, the limit is {MAX_SECONDS} s",
            field="audio",
            fix="Send it in pieces.",
        )
