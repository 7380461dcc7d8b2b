"""Token logs and texts of a run, decoded without the models of the code under test."""

from typing import Any

import msgpack

from chaos.verdict import Entry, Run


def entries_of(run: Run, job_id: str) -> list[Entry]:
    """A token log, decoded."""
    return [_entry(entry_id, fields) for entry_id, fields in run.truth.logs.get(job_id, [])]


def _entry(entry_id: str, fields: dict[str, bytes]) -> Entry:
    writer, _, count = entry_id.partition("-")
    chunk = unpack(fields["d"]) if "d" in fields else {}
    return Entry(
        writer=writer,
        num_tokens=int(count),
        start=int(fields["s"]) if "s" in fields else None,
        ids=tuple(chunk.get("ids", ())),
        text=chunk.get("text", ""),
        claimant=fields["c"].decode() if "c" in fields else None,
        end=unpack(fields["e"]) if "e" in fields else None,
    )


def unpack(data: bytes) -> Any:
    """Decode a message without the models of the code under test: a version byte and a map."""
    return msgpack.unpackb(data[1:], raw=False)


def words_of(text: str) -> list[int]:
    """The tokens that a text stands for."""
    return [int(word.partition("@")[0]) for word in text.split()]


def tags_of(text: str) -> set[str]:
    """Who generated a text."""
    return {word.partition("@")[2] for word in text.split()}


def state_of(stored: dict[str, bytes]) -> str:
    """A job's state."""
    return stored.get("st", b"gone").decode()
