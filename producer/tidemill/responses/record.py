"""What is kept of a response beside its job, and the ids of both; pure."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tidemill.protocol.errors import InvalidRequest, MalformedMessage, NoSuchObject
from tidemill.protocol.ids import shard_of

PREFIX = "resp_"
#: Of one record, before it is compressed; a longer conversation has more tokens than models take.
MAX_RECORD_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """All that is needed to tell a response again, but for what its job produced.

    ``fields`` are those of the answer that the request determines, ``items`` all that the model
    read, the oldest first, and ``reading`` says how its output is read.
    """

    fields: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]]
    reading: Mapping[str, Any]

    def encode(self) -> bytes:
        """Return the record as it is stored; raises ``InvalidRequest`` if it is too long."""
        told = {"fields": self.fields, "items": self.items, "reading": self.reading}
        data = orjson.dumps(told)
        if len(data) > MAX_RECORD_BYTES:
            raise InvalidRequest(
                f"input: with what it needs besides it has {len(data)} bytes,"
                f" the limit of what is kept is {MAX_RECORD_BYTES}",
                field="input",
                fix="Set store to false, or send less.",
            )
        return zlib.compress(data, 1)


def read_record(data: bytes) -> ResponseRecord:
    """Return what was stored; raises ``MalformedMessage``."""
    try:
        unpacker = zlib.decompressobj()
        told = orjson.loads(unpacker.decompress(data, MAX_RECORD_BYTES))
        return ResponseRecord(told["fields"], told["items"], told["reading"])
    except (zlib.error, ValueError, KeyError, TypeError) as error:
        raise MalformedMessage(f"the record of a response cannot be read: {error}") from error


def response_id(job_id: str) -> str:
    """Return the id of the response that a job makes."""
    return f"{PREFIX}{job_id}"


def job_of(given: str) -> str:
    """Return the job of a response, given the id of either; raises ``NoSuchObject``."""
    job_id = given.removeprefix(PREFIX)
    try:
        shard_of(job_id)
    except InvalidRequest as error:
        raise no_response(given) from error
    return job_id


def no_response(given: str) -> NoSuchObject:
    """Return the error for a response of which nothing is known."""
    return NoSuchObject(f"there is no response {given[:80]!r}", object_id=given[:80])
