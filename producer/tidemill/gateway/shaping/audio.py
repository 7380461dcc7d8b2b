"""Transcripts as ``/v1/audio`` tells them."""

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orjson

from tidemill._follow import Chunk
from tidemill.outcomes import Transcription
from tidemill.protocol.messages import Usage
from tidemill.protocol.outcomes import Segment

Encode = Callable[[str], Sequence[int]]


def brief(told: Transcription) -> dict[str, Any]:
    """Return the text and how long the audio was."""
    return {"text": told.text, "usage": {"type": "duration", "seconds": told.seconds}}


def verbose(
    told: Transcription, task: str, granularities: Iterable[str], encode: Encode
) -> dict[str, Any]:
    """Return everything; segments and words as far as they were asked for."""
    body = {
        "task": task,
        "language": told.language,
        "duration": told.seconds,
        **brief(told),
    }
    if "segment" in granularities:
        body["segments"] = [
            _segment(index, segment, encode) for index, segment in enumerate(told.segments)
        ]
    if "word" in granularities:
        body["words"] = [
            {"word": word.text.strip(), "start": word.start, "end": word.end}
            for segment in told.segments
            for word in segment.words
        ]
    return body


def subtitles_srt(segments: Sequence[Segment]) -> str:
    """Return subtitles as SubRip has them."""
    blocks = [
        f"{index}\n{_clock(each.start, ',')} --> {_clock(each.end, ',')}\n{_line(each)}\n"
        for index, each in enumerate(segments, start=1)
    ]
    return "\n".join(blocks)


def subtitles_vtt(segments: Sequence[Segment]) -> str:
    """Return subtitles as WebVTT has them."""
    blocks = [
        f"{_clock(each.start, '.')} --> {_clock(each.end, '.')}\n{_line(each)}\n"
        for each in segments
    ]
    return "\n".join(["WEBVTT\n", *blocks])


class TranscriptEvents:
    """Makes the events of a stream: pieces of the text, then the whole of it."""

    def __init__(self) -> None:
        self._text = ""

    def of_chunk(self, chunk: Chunk) -> bytes:
        """Return the event that tells more text, nothing if there is none."""
        # The text begins with the space before its first word.
        text = chunk.text if self._text else chunk.text.lstrip()
        if not text:
            return b""
        self._text += text
        return _event({"type": "transcript.text.delta", "delta": text})

    def of_end(self, usage: Usage) -> bytes:
        """Return the event that tells everything."""
        told = {
            "type": "tokens",
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        whole = {"type": "transcript.text.done", "text": self._text.strip(), "usage": told}
        return _event(whole)


def _event(data: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(data)


def _segment(index: int, segment: Segment, encode: Encode) -> dict[str, Any]:
    text = segment.text.encode()
    return {
        "id": index,
        "seek": round(segment.start * 100),
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "tokens": list(encode(segment.text)),
        "temperature": segment.temperature,
        "avg_logprob": segment.mean_logprob,
        "compression_ratio": len(text) / len(zlib.compress(text)),
        "no_speech_prob": segment.no_speech,
    }


def _line(segment: Segment) -> str:
    # An arrow would be taken for a line of times.
    return " ".join(segment.text.split()).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}{point}{thousandths:03}"
