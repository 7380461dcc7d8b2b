"""Dead letters: jobs that used up their retries or crashed their workers, and unreadable entries.

For operators; of one shard, all tenants together.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from tidemill._catalogue import SALT_BYTES
from tidemill._link import Link
from tidemill._patience import SaltMissing
from tidemill._reads import JobStatus, Read, job_status, naming, read_metadata
from tidemill.protocol import calls
from tidemill.protocol.calls import REF_FIELDS, JobRef, NewJob
from tidemill.protocol.errors import ConfigError, InvalidRequest
from tidemill.protocol.ids import new_job_id, shard_of
from tidemill.protocol.keys import REQUEUE_KEY, ShardKeys
from tidemill.protocol.messages import JobTerms
from tidemill.protocol.requests import Request, decode_request
from tidemill.protocol.stored import require_number, require_text, stored_number

_PAGE_SIZE = 500

#: Fields of a dead job that its repetition takes over.
_KEPT = ("st", "req", "h", "cost", "tk", "mx", "sm", "bid", "mt", "g", "wh", "meta")


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One entry of the dead letters.

    ``job_id`` is empty for what never became a job: an entry of the front door or of a ``queue``
    that nobody can read; ``entry_id`` was its place there and ``body`` what it said.
    ``attempts`` is None if what stands there is no number.
    """

    letter_id: str
    reason: str
    job_id: str = ""
    tenant: str = ""
    attempts: int | None = 0
    worker_id: str = ""
    queue: str = ""
    entry_id: str = ""
    body: bytes = b""

    @property
    def time_ms(self) -> int:
        """When it was written, Unix time in ms."""
        return int(self.letter_id.partition("-")[0])


@dataclass(frozen=True, slots=True)
class DeadJob:
    """A dead job as it was submitted; ``request`` is None if it is not kept any more."""

    status: JobStatus | None
    request: Request | None


class DeadLetters:
    """Lists, repeats and drops the dead letters of one shard."""

    def __init__(self, link: Link, keys: ShardKeys) -> None:
        self._link = link
        self._keys = keys

    def search(self, *, reason: str = "", tenant: str = "") -> Iterator[DeadLetter]:
        """Yield the letters, oldest first, whose reason contains ``reason``; of all tenants or one.

        Upper and lower case are the same.
        """
        start = "-"
        while page := self._link.read(self._page(start)):
            for letter in page:
                if reason.casefold() in letter.reason.casefold() and tenant in ("", letter.tenant):
                    yield letter
            start = f"({page[-1].letter_id}"

    def find(self, name: str) -> DeadLetter:
        """Return the letter with this id, or of this job; raises ``ConfigError``."""
        for letter in self.search():
            if name in (letter.letter_id, letter.job_id):
                return letter
        raise ConfigError(
            f"there is no dead letter {name[:64]!r}", fix="See `tidemill dlq list` for their ids."
        )

    def job(self, letter: DeadLetter) -> DeadJob:
        """Return what is kept of a letter's job."""
        if not _is_job_id(letter.job_id):
            return DeadJob(None, None)
        status = self._link.read(job_status(self._keys, letter.job_id))
        [request] = self._fields(letter.job_id, "req")
        return DeadJob(status, None if request is None else decode_request(request))

    def requeue(self, letter: DeadLetter) -> str:
        """Submit a letter's job again, drop the letter, and return the new job's id.

        The new job has the dead one as its ``parent``, and neither its delay nor its deadline.
        Called again, after whatever happened in between, it returns the same id.  Raises
        ``InvalidRequest`` if there is no request to repeat or its batch is closed, ``Overloaded``.
        """
        new_job = self._repetition(letter)
        submit = calls.submit(self._keys, new_job)
        try:
            receipt = self._link.call(submit)
        except SaltMissing:
            self._make_salt(new_job.request.tenant)
            receipt = self._link.call(submit)
        # The dead job stays for a while: its owner may still ask how it ended.
        self._drop(letter, with_job=False)
        return receipt.job_id

    def drop(self, letter: DeadLetter) -> bool:
        """Give a letter and its job up; false if somebody else has."""
        return self._drop(letter, with_job=True)

    def _repetition(self, letter: DeadLetter) -> NewJob:
        if not _is_job_id(letter.job_id):
            raise _cannot_requeue(letter, "it is no job, but an entry that nobody could read")
        state, raw, *others = self._fields(letter.job_id, *_KEPT)
        if state is None or raw is None:
            raise _cannot_requeue(letter, "its request is not kept any more")
        with naming(self._keys.job(letter.job_id)):
            return self._new_job(letter, raw, *others)

    def _new_job(self, letter: DeadLetter, raw: bytes, *others: bytes | None) -> NewJob:
        key, cost, tokens, retries, stall, batch, max_output, hint_depth, callback, meta = others
        request = decode_request(raw)
        return NewJob(
            job_id=new_job_id(self._keys.shard),
            request=request,
            routing_key=key or b"",
            cost=require_number("cost", cost),
            num_tokens=require_number("tk", tokens),
            idempotency_key=f"{REQUEUE_KEY}{letter.job_id}",
            body_digest=sha256(raw).hexdigest(),
            terms=JobTerms(
                max_retries=require_number("mx", retries),
                stall_ms=require_number("sm", stall),
                batch=require_text("bid", batch),
                callback_url=require_text("wh", callback),
                metadata=read_metadata(meta),
            ),
            parent=letter.job_id,
            max_output=require_number("mt", max_output),
            hint_depth=require_number("g", hint_depth),
        )

    def _make_salt(self, tenant: str) -> None:
        self._link.call(calls.salt(self._keys, tenant=tenant, random=os.urandom(SALT_BYTES)))

    def _drop(self, letter: DeadLetter, *, with_job: bool) -> bool:
        with_job = with_job and _is_job_id(letter.job_id)
        ref = JobRef.read(letter.job_id, self._fields(letter.job_id, *REF_FIELDS))
        return self._link.call(
            calls.drop_letter(self._keys, ref, entry_id=letter.letter_id, with_job=with_job)
        )

    def _page(self, start: str) -> Read[list[DeadLetter]]:
        command = ("XRANGE", self._keys.dead_letters, start, "+", "COUNT", _PAGE_SIZE)
        return Read((command,), lambda replies: [_letter(*entry) for entry in replies[0]])

    def _fields(self, job_id: str, *names: str) -> Sequence[bytes | None]:
        command = ("HMGET", self._keys.job(job_id), *names)
        found: Sequence[bytes | None] = self._link.read(Read((command,), lambda r: r[0]))
        return found


def _letter(letter_id: bytes, fields: dict[bytes, bytes]) -> DeadLetter:
    def text(name: bytes) -> str:
        return fields.get(name, b"").decode("utf-8", "replace")

    queue = text(b"q")
    return DeadLetter(
        letter_id=letter_id.decode(),
        reason=text(b"r"),
        job_id=text(b"j"),
        tenant=text(b"t") or queue.partition(":")[2],
        attempts=stored_number(fields.get(b"a")),
        worker_id=text(b"w"),
        queue=queue,
        entry_id=text(b"e"),
        body=fields.get(b"b", b""),
    )


def _is_job_id(job_id: str) -> bool:
    try:
        shard_of(job_id)
    except InvalidRequest:
        return False
    return True


def _cannot_requeue(letter: DeadLetter, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"the letter {letter.letter_id} cannot be requeued: {why}",
        field="letter",
        fix=f"Look at it with `tidemill dlq show {letter.letter_id}`, then drop it.",
    )
