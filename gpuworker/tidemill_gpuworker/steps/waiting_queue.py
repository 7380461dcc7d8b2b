"""Sequences that wait for admission, most urgent first."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from tidemill_gpuworker.engine.sequence import PriorityClass, Sequence

_PRIORITY = attrgetter("priority")


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
        seqs, standard = self._seqs, PriorityClass.STANDARD
        first, last = 0, len(seqs)
        if priority_class >= standard:
            first = bisect_left(seqs, standard + (priority_class > standard), key=_PRIORITY)
        if priority_class <= standard:
            last = bisect_left(seqs, standard + (priority_class == standard), key=_PRIORITY)
        return seqs[first:last]

    def push(self, seq: Sequence) -> None:
        """Put ``seq`` in its place."""
        insort(self._seqs, seq, key=urgency)

    def remove(self, seq: Sequence) -> None:
        """Take ``seq`` out, wherever it stands."""
        self._seqs.remove(seq)


def urgency(seq: Sequence) -> tuple[int, int]:
    """Return the sort key of ``seq``: the smaller, the sooner it runs and the later it yields."""
    return (seq.priority, seq.arrival)
