"""Files of OpenAI's API: what is known of them, and where their content is."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tidemill.protocol.keys import ShardKeys
from tidemill.protocol.stored import require_number, require_text

#: The largest input of a batch, as at OpenAI.
MAX_BATCH_INPUT_BYTES = 200 * 1000 * 1000
#: The largest file of another purpose, unless a gateway says otherwise.
MAX_FILE_BYTES = 512 * 1024 * 1024
DEFAULT_FILE_SECONDS = 30 * 24 * 3600
MIN_FILE_SECONDS = 3600
MAX_FILE_SECONDS = 30 * 24 * 3600
MAX_FILENAME_CHARS = 512

_TENANT = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_ID = re.compile(r"(file-|batch_)\w{1,64}", re.ASCII)


class Purpose(StrEnum):
    """What a file is for; Tidemill uses the first two, the others are kept for their owner."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"
    ASSISTANTS = "assistants"
    EVALS = "evals"
    FINE_TUNE = "fine-tune"
    USER_DATA = "user_data"
    VISION = "vision"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file: its size in bytes, times in ms of the server's clock."""

    file_id: str
    num_bytes: int
    filename: str
    purpose: str
    created_ms: int = 0
    expires_ms: int = 0

    def fields(self) -> tuple[str | int, ...]:
        """Return what its hash holds beside the times, as names and values."""
        return ("by", self.num_bytes, "fn", self.filename, "pu", self.purpose)

    @classmethod
    def read(cls, file_id: str, fields: Mapping[bytes, bytes]) -> "StoredFile | None":
        """Return what a hash tells, None if there is none; raises ``MalformedMessage``."""
        if not fields:
            return None
        return cls(
            file_id,
            require_number("by", fields.get(b"by")),
            require_text("fn", fields.get(b"fn")),
            require_text("pu", fields.get(b"pu")),
            require_number("ca", fields.get(b"ca")),
            require_number("xa", fields.get(b"xa")),
        )

    def plain(self) -> dict[str, Any]:
        """Return the object of OpenAI's API."""
        return {
            "id": self.file_id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_ms // 1000,
            "expires_at": self.expires_ms // 1000,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


def file_blob(keys: ShardKeys, tenant: str, file_id: str) -> str:
    """Return the name of a file's content in the blob store."""
    return f"{keys.shard}/files/{_folder(tenant)}/{file_id}"


def part_blobs(keys: ShardKeys, tenant: str, batch_id: str) -> str:
    """Return what the names of the parts of a batch's output begin with."""
    return f"{keys.shard}/parts/{_folder(tenant)}/{batch_id}"


def _folder(tenant: str) -> str:
    # A tenant may be called "..".
    return f"t-{tenant}"


def owner_of(member: str) -> tuple[str, str, str] | None:
    """Return kind, tenant and id of a member of the ``fx`` index; None if it is none of ours."""
    kind, tenant, object_id = [*member.split(" "), "", "", ""][:3]
    is_ours = kind in ("file", "batch") and _TENANT.fullmatch(tenant) and _ID.fullmatch(object_id)
    return (kind, tenant, object_id) if is_ours and member.count(" ") == 2 else None


def file_member(tenant: str, file_id: str) -> str:
    """Return a file's name in the ``fx`` index."""
    return f"file {tenant} {file_id}"


def batch_member(tenant: str, batch_id: str) -> str:
    """Return a batch's name in the ``fx`` index."""
    return f"batch {tenant} {batch_id}"
