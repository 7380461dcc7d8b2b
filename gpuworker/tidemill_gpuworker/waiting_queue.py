"""Sequences that wait for admission, most urgent first."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from tidemill_gpuworker.sequence import PriorityClass, Sequence


class WaitingQueue:
    """Sequences by priority (lower is sooner), then by arrival.

    A preempted sequence keeps its arrival number.  It was admitted before everything of its
    priority that still waits, so putting it back puts it in front of those.
    """

    def __init__(self) -> None:
        self._seqs: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    def of_class(self, priority_class: PriorityClass) -> list[Sequence]:
        """Return the sequences of one class, most urgent first."""
        start = bisect_left(self._seqs, priority_class, key=_class)
        return self._seqs[start : bisect_right(self._seqs, priority_class, key=_class)]

    def push(self, seq: Sequence) -> None:
        """Put ``seq`` in its place."""
        insort(self._seqs, seq, key=urgency)

    def remove(self, seq: Sequence) -> None:
        """Take ``seq`` out, wherever it stands."""
        self._seqs.remove(seq)


def urgency(seq: Sequence) -> tuple[int, int]:
    """Return the sort key of ``seq``: the smaller, the sooner it runs and the later it yields."""
    return (seq.priority, seq.arrival)


def _class(seq: Sequence) -> PriorityClass:
    return seq.priority_class
