"""Calls about files and batches of requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.protocol.batches import BatchUsage, NewBatch
from tidemill.protocol.calls.replies import text
from tidemill.protocol.files import StoredFile, batch_member, file_member
from tidemill.protocol.functions import Call, Field
from tidemill.protocol.keys import ShardKeys


@dataclass(frozen=True, slots=True)
class Leased:
    """Reply of lease_batch: ``ok`` is false if another one works on it, or it has ended."""

    ok: bool
    state: str
    now_ms: int
    expires_ms: int


def active_member(tenant: str, batch_id: str) -> str:
    """Return a batch's name in the index of those that work."""
    return f"{tenant} {batch_id}"


def put_file(keys: ShardKeys, tenant: str, file: StoredFile, *, ttl_ms: int) -> Call[bool]:
    """Make a file known whose content is in the store; false if it was."""
    return Call(
        "put_file",
        (keys.file(tenant, file.file_id), keys.files(tenant), keys.stored_until),
        (file.file_id, file_member(tenant, file.file_id), ttl_ms, *file.fields()),
        bool,
    )


def drop_file(keys: ShardKeys, tenant: str, file_id: str) -> Call[bool]:
    """Delete a file for its owner; false if there is none."""
    return Call(
        "drop_file",
        (keys.file(tenant, file_id), keys.files(tenant), keys.stored_until),
        (file_id, file_member(tenant, file_id)),
        bool,
    )


def forget_file(keys: ShardKeys, tenant: str, file_id: str) -> Call[bool]:
    """Forget a file whose time is over and whose blob is gone."""
    return Call(
        "forget_stored",
        (keys.file(tenant, file_id), keys.files(tenant), keys.stored_until),
        (file_id, file_member(tenant, file_id)),
        bool,
    )


def forget_batch(keys: ShardKeys, tenant: str, batch_id: str) -> Call[bool]:
    """Forget a batch whose time is over and whose blobs are gone."""
    return Call(
        "forget_stored",
        (keys.batch_object(tenant, batch_id), keys.batch_objects(tenant), keys.stored_until),
        (batch_id, batch_member(tenant, batch_id)),
        bool,
    )


def create_batch(keys: ShardKeys, tenant: str, batch: NewBatch) -> Call[tuple[int, str]]:
    """Accept a batch: replies 1, or 0 if it was, and the id of the one that has its key.

    Raises ``NoSuchObject`` if its input is gone, ``IdempotencyConflict`` if the key is another's.
    """
    return Call(
        "create_batch",
        (
            keys.batch_object(tenant, batch.batch_id),
            keys.batch_objects(tenant),
            keys.active_batches,
            keys.stored_until,
            keys.file(tenant, batch.input_file_id),
            keys.idempotency(tenant, batch.idempotency_key),
        ),
        (
            batch.batch_id,
            active_member(tenant, batch.batch_id),
            batch_member(tenant, batch.batch_id),
            file_member(tenant, batch.input_file_id),
            batch.window_seconds * 1000,
            batch.idempotency_key,
            batch.digest,
            *batch.fields(),
        ),
        _outcome,
    )


def lease_batch(
    keys: ShardKeys,
    tenant: str,
    batch_id: str,
    *,
    owner: str,
    lease_ms: int,
    cursor: int = 0,
    num_answered: int = 0,
    num_failed: int = 0,
) -> Call[Leased]:
    """Take or renew the right to work on a batch, 0 ms to give it up, and tell how far it is."""
    return Call(
        "lease_batch",
        (keys.batch_object(tenant, batch_id),),
        (owner, lease_ms, cursor, num_answered, num_failed),
        lambda reply: Leased(bool(reply[0]), text(reply[1]), int(reply[2]), int(reply[3])),
    )


def turn_batch(
    keys: ShardKeys,
    tenant: str,
    batch_id: str,
    *,
    owner: str,
    was: str,
    becomes: str,
    fields: Sequence[Field] = (),
) -> Call[tuple[int, str]]:
    """Move a batch to its next state, with fields as names and values.

    Replies (1, state), (0, state) if it is in another state, or (-1, state) if another one works
    on it.
    """
    return Call(
        "turn_batch",
        (
            keys.batch_object(tenant, batch_id),
            keys.batch_parts(tenant, batch_id),
            keys.active_batches,
            keys.stored_until,
            keys.outbox,
            keys.hooks(tenant),
        ),
        (
            owner,
            was,
            becomes,
            active_member(tenant, batch_id),
            batch_member(tenant, batch_id),
            tenant,
            batch_id,
            *fields,
        ),
        _outcome,
    )


def part_batch(
    keys: ShardKeys,
    tenant: str,
    batch_id: str,
    *,
    owner: str,
    number: int,
    num_answered: int,
    num_failed: int,
    usage: BatchUsage,
) -> Call[int]:
    """Count a part of the output that is in the store, once.

    Replies 1 counted, 0 it was, -1 if another one works on the batch.
    """
    return Call(
        "part_batch",
        (keys.batch_object(tenant, batch_id), keys.batch_parts(tenant, batch_id)),
        (
            owner,
            number,
            num_answered,
            num_failed,
            usage.input_tokens,
            usage.cached_tokens,
            usage.output_tokens,
        ),
        int,
    )


def stop_batch(
    keys: ShardKeys, tenant: str, batch_id: str, *, output_id: str, error_id: str
) -> Call[tuple[int, str]]:
    """Ask for the end of a batch, whose partial output will be the files of these ids.

    Replies (1, state) it will end, (0, state) it works no more, (0, "") there is none.
    """
    return Call(
        "stop_batch", (keys.batch_object(tenant, batch_id),), (output_id, error_id), _outcome
    )


def _outcome(reply: Any) -> tuple[int, str]:
    return int(reply[0]), text(reply[1])
