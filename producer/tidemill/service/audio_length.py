"""How long a piece of audio is, by its first bytes: exact for WAV and FLAC, else a guess; pure."""

import struct

#: Bytes a second of compressed speech, where the file does not tell: 64 kbit/s.
_GUESSED_BYTES_PER_SECOND = 8_000
#: The longest that any audio of the size a job may have can claim to be: a day.
_MAX_SECONDS = 86_400.0

_RIFF_HEADER = 12
_CHUNK_HEADER = 8
_FLAC_STREAMINFO = slice(8, 42)


def audio_seconds(data: bytes, num_bytes: int | None = None) -> float:
    """Return the length that a file's header states, or one guessed from its size.

    ``num_bytes`` is the size of the file if ``data`` is its beginning alone.  Only for accounts: a
    worker decodes the file and finds the true length.
    """
    size = len(data) if num_bytes is None else num_bytes
    stated = None
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        stated = _wav_seconds(data, size)
    elif data[:4] == b"fLaC" and len(data) >= _FLAC_STREAMINFO.stop:
        stated = _flac_seconds(data[_FLAC_STREAMINFO])
    if stated is None:
        stated = size / _GUESSED_BYTES_PER_SECOND
    return min(stated, _MAX_SECONDS)


def _wav_seconds(data: bytes, num_bytes: int) -> float | None:
    """Divide the size of the data chunk by the format's bytes per second."""
    position, bytes_per_second = _RIFF_HEADER, 0
    while position + _CHUNK_HEADER <= len(data):
        name, size = struct.unpack_from("<4sI", data, position)
        position += _CHUNK_HEADER
        if name == b"fmt " and position + 12 <= len(data):
            bytes_per_second = struct.unpack_from("<I", data, position + 8)[0]
        elif name == b"data":
            present = min(size, num_bytes - position)
            return present / bytes_per_second if bytes_per_second else None
        position += size + size % 2
    return None


def _flac_seconds(info: bytes) -> float | None:
    """Read the STREAMINFO block: 20 bits of sample rate, 36 bits of number of samples."""
    packed = int.from_bytes(info[10:18], "big")
    rate, num_samples = packed >> 44, packed & (1 << 36) - 1
    return num_samples / rate if rate and num_samples else None
