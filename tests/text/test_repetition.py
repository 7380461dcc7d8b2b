"""Outputs that repeat a pattern end, and no others."""

from hypothesis import given
from hypothesis import strategies as st

from tidemill.protocol.sampling import RepetitionDetection
from tidemill_gpuworker.engine.repetition import RepetitionDetector


def repeats(ids: list[int], params: RepetitionDetection) -> bool:
    """Whether the last tokens are a pattern several times over, by comparing the pieces."""
    for size in range(params.min_pattern_size, params.max_pattern_size + 1):
        pieces = [
            ids[-size * k : len(ids) - size * (k - 1)] for k in range(1, params.min_count + 1)
        ]
        if len(ids) >= size * params.min_count and all(piece == pieces[0] for piece in pieces):
            return True
    return False


@given(
    ids=st.lists(st.integers(0, 2), max_size=40),
    least=st.integers(1, 4),
    more=st.integers(0, 4),
    count=st.integers(2, 4),
)
def test_a_repetition_is_noticed_with_its_last_token(
    ids: list[int], least: int, more: int, count: int
) -> None:
    params = RepetitionDetection(
        min_pattern_size=least, max_pattern_size=least + more, min_count=count
    )
    detector = RepetitionDetector(params)
    for end, token_id in enumerate(ids, start=1):
        assert detector.push(token_id) == repeats(ids[:end], params)
