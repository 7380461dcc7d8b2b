"""Notices an output that says the same over and over."""

from tidemill.protocol.sampling import RepetitionDetection


class RepetitionDetector:
    """Follows the tokens of one output.

    For each size of pattern it counts for how many tokens in a row the one that many places
    before was the same: a pattern stands there k times if that holds for (k - 1) patterns.
    """

    def __init__(self, params: RepetitionDetection) -> None:
        self._sizes = range(params.min_pattern_size, params.max_pattern_size + 1)
        self._min_count = params.min_count
        self._ids: list[int] = []
        self._run_lengths = [0] * len(self._sizes)

    def push(self, token_id: int) -> bool:
        """Take the next token; returns whether a pattern now stands there often enough."""
        is_repeated = False
        for place, size in enumerate(self._sizes):
            if size > len(self._ids):
                break
            same = self._ids[-size] == token_id
            run = self._run_lengths[place] + 1 if same else 0
            self._run_lengths[place] = run
            is_repeated = is_repeated or run >= size * (self._min_count - 1)
        self._ids.append(token_id)
        return is_repeated
