"""The table of ``docs/compatibility.md``: which client was run, with what, and how it went."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"
BEGIN, END = "<!-- clients: begin -->", "<!-- clients: end -->"
HEAD = ("client", "version", "what was run", "result", "notes")


@dataclass(frozen=True)
class Outcome:
    """How one test of a client went; ``flaw`` is None if it passed."""

    client: str
    version: str
    ran: tuple[str, ...]
    flaw: str | None
    notes: str


@dataclass(frozen=True)
class Row:
    """What all tests of a client told."""

    client: str
    version: str
    ran: str
    result: str
    notes: str

    @property
    def cells(self) -> tuple[str, ...]:
        """In the order of the table's head."""
        return (self.client, self.version, self.ran, self.result, self.notes)


def rows_of(outcomes: Iterable[Outcome]) -> list[Row]:
    """Return a row for each client, in the order of their first tests."""
    by_client: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_client.setdefault(outcome.client, []).append(outcome)
    return [_row(client, told) for client, told in by_client.items()]


def _row(client: str, outcomes: list[Outcome]) -> Row:
    def distinct(values: Iterable[str]) -> list[str]:
        return [value for value in dict.fromkeys(values) if value]

    return Row(
        client,
        ", ".join(distinct(each.version for each in outcomes)),
        ", ".join(distinct(name for each in outcomes for name in each.ran)),
        "; ".join(distinct(each.flaw or "" for each in outcomes)) or "passes",
        " ".join(distinct(each.notes for each in outcomes)),
    )


def rows_in(text: str) -> dict[str, Row]:
    """Return the rows of a document's table by client."""
    table = text.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    cells = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in table[2:])
    return {each[0]: Row(*each) for each in cells}


def with_rows(text: str, rows: Mapping[str, Row]) -> str:
    """Return the document with a table of these rows; raises ValueError if it has no place."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{BEGIN} and {END} must both be in the document")
    lines = [
        HEAD,
        ("---",) * len(HEAD),
        *(rows[name].cells for name in sorted(rows, key=str.lower)),
    ]
    table = "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/") or "-"


def record(outcomes: Iterable[Outcome], *, keep_others: bool) -> None:
    """Write the table into the document; ``keep_others`` leaves rows of other clients."""
    text = DOCUMENT.read_text()
    rows = rows_in(text) if keep_others else {}
    told = {row.client: row for row in rows_of(outcomes)}
    DOCUMENT.write_text(with_rows(text, {**rows, **told}))
