"""Job and worker ids."""

import binascii
import os
import re
import time

from tidemill.protocol.errors import InvalidRequest

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
FILE_PREFIX, BATCH_PREFIX = "file-", "batch_"
_STORED_ID = re.compile(rf"({FILE_PREFIX}|{BATCH_PREFIX})[0-9A-HJKMNP-TV-Z]{{26}}")
_JOB_ID = re.compile(r"^job_([0-9a-f]{2})[0-9A-HJKMNP-TV-Z]{26}$")


def new_ulid(now_ms: int | None = None) -> str:
    """Return a ULID: 48 bits of time in ms and 80 random bits, 26 characters of base 32."""
    timestamp = int(time.time() * 1000) if now_ms is None else now_ms
    value = (timestamp & (2**48 - 1)) << 80 | int.from_bytes(os.urandom(10), "big")
    return "".join(_CROCKFORD[(value >> shift) & 31] for shift in range(125, -1, -5))


def new_job_id(shard: str = "00") -> str:
    """Return a fresh job id that names its shard; 80 random bits make it unguessable."""
    return f"job_{shard}{new_ulid()}"


def new_worker_id() -> str:
    """Return a worker id; a new one for each process start, so its streams are never reused."""
    return f"wkr_{new_ulid()}"


def new_scheduler_id() -> str:
    """Return the id under which one scheduler process asks to lead."""
    return f"sch_{new_ulid()}"


def new_file_id() -> str:
    """Return a fresh id of a file; ids sort by their time."""
    return f"{FILE_PREFIX}{new_ulid()}"


def new_batch_id() -> str:
    """Return a fresh id of a batch; ids sort by their time."""
    return f"{BATCH_PREFIX}{new_ulid()}"


def is_stored_id(given: str, prefix: str) -> bool:
    """Whether ``given`` has the form of an id of a file or a batch."""
    match = _STORED_ID.fullmatch(given)
    return match is not None and match.group(1) == prefix


def shard_of(job_id: str) -> str:
    """Return the two hex digits of the shard in ``job_id``; raises ``InvalidRequest``."""
    match = _JOB_ID.match(job_id)
    if match is None:
        raise InvalidRequest(
            f"job_id: {job_id[:64]!r} is not a job id",
            field="job_id",
            fix="Use an id that submit returned.",
        )
    return match.group(1)


def shard_for_tenant(tenant: str, num_shards: int = 1) -> str:
    """Return the shard that owns a tenant's jobs: CRC-16/XMODEM modulo the number of shards."""
    return f"{binascii.crc_hqx(tenant.encode(), 0) % num_shards:02x}"
