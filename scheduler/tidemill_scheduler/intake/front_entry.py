"""What raw producers put at the front door: one entry, checked; pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any, Generic, TypeVar, cast

from pydantic import AfterValidator, Field, ValidationError

from tidemill.protocol.calls import NewJob
from tidemill.protocol.codec import (
    MAX_ARRAY_LEN,
    MAX_MESSAGE_BYTES,
    WIRE_VERSION,
    encode,
    unpack,
)
from tidemill.protocol.errors import InvalidRequest, MalformedMessage, UnsupportedVersion
from tidemill.protocol.ids import new_job_id
from tidemill.protocol.keys import FRONT_KEY, RESERVED_KEYS
from tidemill.protocol.messages import GenerateRequest, JobTerms, ModelCard, invalid_request
from tidemill.protocol.requests import REQUESTS, Request, kind_of
from tidemill.protocol.wire_model import WireModel
from tidemill.service.job_inputs import (
    bound_of_output,
    most_job_tokens,
    validate_job,
    with_known_defaults,
)

#: Stands for "the only model that is served", in the digest of the body too.
ANY_MODEL = "-"


def _not_reserved(key: str) -> str:
    if key.startswith(RESERVED_KEYS):
        raise ValueError(f"it begins with {' or '.join(RESERVED_KEYS)}, which is reserved")
    return key


_Key = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_not_reserved)]


R = TypeVar("R", bound=WireModel)


class _Body(WireModel, Generic[R]):
    request: R
    terms: JobTerms = JobTerms()
    idempotency_key: _Key | None = None


def _body_of(request: type[WireModel]) -> type[_Body[Any]]:
    # Made while the program runs, so that no type checker can know it.
    return cast(type[_Body[Any]], _Body.__class_getitem__(request))


_BODIES: Mapping[str, type[_Body[Any]]] = {
    kind: _body_of(request) for kind, request in REQUESTS.items()
}


@dataclass(frozen=True, slots=True)
class FrontEntry:
    """A valid entry as its producer wrote it: the model may be open."""

    entry_id: str
    request: Request
    terms: JobTerms
    idempotency_key: str
    body_digest: str

    @property
    def model(self) -> str | None:
        """The model's name, None for the only one that is served."""
        return None if self.request.model == ANY_MODEL else self.request.model

    @property
    def lane(self) -> str:
        """Entries of one lane wait for each other; an overloaded tenant holds up only its own."""
        return f"{self.request.tenant} {self.request.model}"


def parse_entry(entry_id: str, fields: Mapping[bytes, bytes]) -> FrontEntry:
    """Read an entry.

    Raises ``MalformedMessage``, ``UnsupportedVersion`` or, naming the field, ``InvalidRequest``.
    """
    _check_version(fields)
    body = _read_body(_parse_body(fields[b"body"]))
    request: Request = body.request
    return FrontEntry(
        entry_id=entry_id,
        request=request,
        terms=body.terms,
        idempotency_key=body.idempotency_key or f"{FRONT_KEY}{entry_id}",
        body_digest=sha256(_checked(request) + encode(body.terms)).hexdigest(),
    )


def make_front_job(entry: FrontEntry, card: ModelCard, shard: str) -> NewJob:
    """Return the job that the model of ``card`` is to run.

    It has no routing key and no cost: the tokenise pool finds both.  A seed that is not given
    stays open, as in the jobs of the SDK: the job's id determines it.  Raises ``InvalidRequest`` if
    the model cannot run it.
    """
    request = entry.request.model_copy(update={"model": card.name})
    request = with_known_defaults(request, card)
    validate_job(request, card)
    _checked(request)
    return NewJob(
        job_id=new_job_id(shard),
        request=request,
        num_tokens=most_job_tokens(request, card),
        idempotency_key=entry.idempotency_key,
        body_digest=entry.body_digest,
        terms=entry.terms,
        max_output=bound_of_output(request),
    )


def _read_body(fields: Any) -> _Body[Any]:
    given = fields.get("request") if isinstance(fields, dict) else None
    kind = kind_of(given)
    if kind not in REQUESTS:
        raise InvalidRequest(
            f"request.kind: {kind[:40]!r} is not one of {', '.join(REQUESTS)}",
            field="request.kind",
        )
    if isinstance(given, dict):
        fields = {**fields, "request": {"model": ANY_MODEL, **given}}
    try:
        return _BODIES[kind].model_validate(fields)
    except ValidationError as error:
        raise invalid_request(error) from error


def _check_version(fields: Mapping[bytes, bytes]) -> None:
    if b"v" not in fields:
        raise MalformedMessage("v: missing", fix=f"Write {WIRE_VERSION}.")
    if fields[b"v"] != str(WIRE_VERSION).encode():
        raise UnsupportedVersion(
            f"v: {fields[b'v'][:20]!r} is no version that this scheduler reads",
            fix=f"Write {WIRE_VERSION}, or upgrade the scheduler.",
        )
    if b"body" not in fields:
        raise MalformedMessage("body: missing")
    if unknown := sorted(fields.keys() - {b"v", b"body"}):
        raise MalformedMessage(f"{unknown[0][:40]!r}: an entry has the fields v and body only")


def _parse_body(body: bytes) -> Any:
    if len(body) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"body: {len(body)} bytes, the limit is {MAX_MESSAGE_BYTES}")
    # No msgpack map begins with a brace or a space.
    if not body.lstrip().startswith(b"{"):
        return unpack(body)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"body: not JSON: {str(error)[:200]}") from error


def _checked(request: Request) -> bytes:
    """Encode a request as workers are to read it, within the bounds of what they read."""
    ids = request.prompt_ids if isinstance(request, GenerateRequest) else None
    if len(ids or ()) > MAX_ARRAY_LEN:
        raise InvalidRequest(
            f"request.prompt_ids: more than {MAX_ARRAY_LEN} tokens", field="request.prompt_ids"
        )
    data = encode(request)
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvalidRequest(
            f"request: it has {len(data)} bytes, the limit is {MAX_MESSAGE_BYTES}", field="request"
        )
    return data
