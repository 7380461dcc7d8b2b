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

_Cell = tuple[str, str]
_Row = frozenset[_Cell]


@dataclass(frozen=True, slots=True)
class OrderedRow:
    """Row ``index`` of the input, with its (field, value) pairs in the order to write them."""

    index: int
    fields: tuple[_Cell, ...]

    def text(self, separator: str = "\n") -> str:
        """Return the fields as ``name: value`` lines."""
        return separator.join(f"{name}: {value}" for name, value in self.fields)


def order_fields(
    rows: Sequence[Mapping[str, object]], *, length: Callable[[str], int] = len
) -> list[OrderedRow]:
    """Return the rows in an order, each with its fields in an order, so that neighbours share.

    Values are written with ``str``; rows may lack fields.  ``length`` is what a name or a value
    costs, characters by default.  Of two rows alone all common fields become a shared prefix; of
    more, the neighbours share at least what the best single value saves.  Takes time that grows
    with rows x fields x fields.
    """
    table = [frozenset((name, str(value)) for name, value in row.items()) for row in rows]
    weights = {cell: sum(map(length, cell)) for cell in {cell for row in table for cell in row}}
    ordered: list[OrderedRow] = []
    for index, cells in _recurse(dict(enumerate(table)), weights):
        names = list(rows[index])
        rest = sorted(table[index].difference(cells), key=lambda cell: names.index(cell[0]))
        ordered.append(OrderedRow(index, (*cells, *rest)))
    return ordered


def _recurse(
    table: Mapping[int, _Row], weights: Mapping[_Cell, int]
) -> Iterable[tuple[int, tuple[_Cell, ...]]]:
    """Yield row numbers and the cells that go first in each; the others are shared by nobody."""
    groups, alone = _take_groups(table, weights)
    for head, members in groups:
        taken = frozenset(head)
        inner = {index: table[index] - taken for index in members}
        for index, cells in _recurse(inner, weights):
            yield index, (*head, *cells)
    for index in alone:
        yield index, ()


def _take_groups(
    table: Mapping[int, _Row], weights: Mapping[_Cell, int]
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
    rows: Sequence[_Row], weights: Mapping[_Cell, int], first: _Cell
) -> tuple[_Cell, ...]:
    common = frozenset.intersection(*rows) - {first}
    return (first, *sorted(common, key=lambda cell: (-weights[cell], cell)))
