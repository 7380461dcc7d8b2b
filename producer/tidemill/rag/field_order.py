"""An order of rows, and of the fields within each, for a query over a table; pure.

The rule is the greedy group recursion of Liu et al., "Optimizing LLM Queries in Relational Data
Analytics Workloads" (arXiv 2403.05821): take the value whose rows would save most if it came first
in all of them, put these rows together, go on with their other fields, and then with the rows that
are left.  Three simplifications:

* A value saves its length and not the square of it: we count tokens that are not computed.
* Nobody declares functional dependencies.  Fields that are constant within a group follow the
  value that made it, which is all that a dependency would bring.
* It ends where no value occurs twice, and not at a given depth.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from tidemill.rag._checks import check_rows, check_text, checked_length, written, wrong_kind

_Cell = tuple[str, str]
_Row = frozenset[_Cell]


@dataclass(frozen=True, slots=True)
class OrderedRow:
    """Row ``index`` of the input, with its (field, value) pairs in the order to write them."""

    index: int
    fields: tuple[_Cell, ...]

    def text(self, separator: str = "\n") -> str:
        """Return the fields as ``name: value`` lines; raises ``InvalidRequest``."""
        check_text(separator, "separator")
        return separator.join(f"{name}: {value}" for name, value in self.fields)


def order_fields(
    rows: Sequence[Mapping[str, object]], *, length: Callable[[str], float] = len
) -> list[OrderedRow]:
    """Return the rows in an order, each with its fields in an order, so that neighbours share.

    Values are written with ``str``; rows may lack fields.  ``length`` is what a name or a value
    costs, characters by default: a number from 0 to 10^12.  Of two rows alone all common fields
    become a shared prefix; of more, the neighbours share at least what the best single value saves.
    Takes time that grows with rows x fields x fields.  Raises ``InvalidRequest``.
    """
    check_rows(rows, "rows")
    if not callable(length):
        raise wrong_kind("length", length, "a function")
    given = [_cells(row, index) for index, row in enumerate(rows)]
    table = {index: frozenset(cells) for index, cells in enumerate(given)}
    weights = {cell: _weight(cell, length) for cell in frozenset().union(*table.values())}
    ordered: list[OrderedRow] = []
    for index, head in _walk(table, weights):
        taken = frozenset(head)
        rest = [cell for cell in given[index] if cell not in taken]
        ordered.append(OrderedRow(index, (*head, *rest)))
    return ordered


def _cells(row: Mapping[str, object], index: int) -> list[_Cell]:
    return [(name, written(value, f"rows.{index}.{name}")) for name, value in row.items()]


def _weight(cell: _Cell, length: Callable[[str], float]) -> float:
    return sum(checked_length(length(text)) for text in cell)


def _walk(
    table: Mapping[int, _Row], weights: Mapping[_Cell, float]
) -> Iterable[tuple[int, tuple[_Cell, ...]]]:
    """Yield row numbers and the cells that go first in each; the others are shared by nobody.

    The groups wait on a stack of our own: they nest as deep as rows have fields, which can be
    deeper than Python lets functions call each other.
    """
    waiting: list[tuple[tuple[_Cell, ...], Mapping[int, _Row]]] = [((), table)]
    while waiting:
        head, rows = waiting.pop()
        groups, alone = _take_groups(rows, weights)
        if not groups:
            yield from ((index, head) for index in alone)
            continue
        # Last in, first out: the groups in their order, each before those that are left over.
        waiting.append((head, dict.fromkeys(alone, frozenset())))
        for cells, members in reversed(groups):
            taken = frozenset(cells)
            inner = {index: rows[index] - taken for index in members}
            waiting.append(((*head, *cells), inner))


def _take_groups(
    table: Mapping[int, _Row], weights: Mapping[_Cell, float]
) -> tuple[list[tuple[tuple[_Cell, ...], list[int]]], list[int]]:
    """Cut a table into groups, each with the cells that all its rows hold, and a rest."""
    counts = Counter(cell for row in table.values() for cell in row)
    holders: dict[_Cell, list[int]] = defaultdict(list)
    for index, row in table.items():
        for cell in row:
            holders[cell].append(index)
    # Counts only fall, so a stale entry of the heap is too high and is put back where it belongs.
    heap = [(-weights[cell] * (n - 1), cell) for cell, n in counts.items() if n > 1]
    heapify(heap)
    left = dict(table)
    groups = []
    while heap:
        score, cell = heappop(heap)
        now = -weights[cell] * (counts[cell] - 1)
        if counts[cell] < 2 or now != score:
            if counts[cell] > 1:
                heappush(heap, (now, cell))
            continue
        members = [index for index in holders[cell] if index in left]
        groups.append((_common_cells([left[index] for index in members], weights, cell), members))
        for index in members:
            counts.subtract(left.pop(index))
    return groups, list(left)


def _common_cells(
    rows: Sequence[_Row], weights: Mapping[_Cell, float], first: _Cell
) -> tuple[_Cell, ...]:
    common = frozenset.intersection(*rows) - {first}
    return (first, *sorted(common, key=lambda cell: (-weights[cell], cell)))
