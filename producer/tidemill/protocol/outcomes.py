"""What jobs of the kinds *embed*, *score* and *transcribe* leave behind."""

import array
import sys
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from tidemill.protocol.values import AnyText, ShortName
from tidemill.protocol.wire_model import Natural, Seconds, WireModel

#: Bytes of one component of a vector.
FLOAT_BYTES = 4


class Vectors(WireModel):
    """Rows of equal length, packed as little-endian float32, one row after the other."""

    num_rows: int = Field(ge=0)
    size: int = Field(ge=1)
    data: Annotated[bytes, Field(strict=True)] = b""

    @model_validator(mode="after")
    def _whole(self) -> "Vectors":
        expected = self.num_rows * self.size * FLOAT_BYTES
        if len(self.data) != expected:
            raise ValueError(
                f"{len(self.data)} bytes are not {self.num_rows} vectors of {self.size} float32"
            )
        return self

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]], size: int) -> "Vectors":
        """Pack rows of ``size`` numbers each."""
        numbers = array.array("f", (number for row in rows for number in row))
        return cls(num_rows=len(rows), size=size, data=_little_endian(numbers).tobytes())

    def rows(self) -> list[tuple[float, ...]]:
        """Return the rows as Python floats."""
        numbers = array.array("f")
        numbers.frombytes(self.data)
        flat = _little_endian(numbers)
        return [
            tuple(flat[start : start + self.size])
            for start in range(0, self.num_rows * self.size, self.size)
        ]


class Word(WireModel):
    """One spoken word; ``text`` begins with the space before it, as the model wrote it."""

    text: AnyText
    start: Seconds
    end: Seconds
    probability: float = Field(default=0.0, ge=0.0, le=1.0)


class Segment(WireModel):
    """A stretch of speech between two timestamps, in seconds from the start of the audio.

    ``mean_logprob`` is the mean log-probability of the tokens of its window, ``no_speech`` the
    probability that the window holds no speech, ``temperature`` the one it was decoded at.
    """

    text: AnyText
    start: Seconds
    end: Seconds
    mean_logprob: float = 0.0
    no_speech: float = Field(default=0.0, ge=0.0, le=1.0)
    temperature: float = Field(default=0.0, ge=0.0)
    words: tuple[Word, ...] = ()


class Transcript(WireModel):
    """What was said: ``language`` is a code such as ``en``, ``seconds`` the length of the audio."""

    language: ShortName
    seconds: Seconds
    segments: tuple[Segment, ...] = ()


class Outcome(WireModel):
    """The result of a job that does more than generate tokens; the field of its kind is set."""

    vectors: Vectors | None = None
    scores: tuple[float, ...] | None = None
    transcript: Transcript | None = None
    #: Input tokens of an embed or score job.
    input_tokens: Natural = 0


def _little_endian(numbers: "array.array[float]") -> "array.array[float]":
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
