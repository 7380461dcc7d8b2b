"""When decodes of the batch class stand back for interactive prefills."""

from collections.abc import Iterable

from tidemill_gpuworker.engine.sequence import PriorityClass, Sequence


class BatchPause:
    """Chooses the decodes that a step may leave out, and for how many steps in a row.

    Each decode makes a step longer by the context it attends to.  Somebody waits for the first
    token of an interactive prompt, and nobody for the next one of a batch job.  Not more than
    ``most_steps`` steps in a row pause, so that who reads a batch job hears from it (0: none).
    """

    def __init__(self, most_steps: int) -> None:
        self._most_steps = most_steps
        self._num_steps = 0

    def choose(self, decodes: Iterable[Sequence], *, is_wanted: bool) -> list[Sequence]:
        """Return those of ``decodes`` to be left out; none unless it is wanted."""
        if not is_wanted or self._num_steps >= self._most_steps:
            return []
        return [seq for seq in decodes if seq.priority_class is PriorityClass.BATCH]

    def count(self, *, is_pause: bool) -> None:
        """Note whether the step left any out."""
        self._num_steps = self._num_steps + 1 if is_pause else 0
