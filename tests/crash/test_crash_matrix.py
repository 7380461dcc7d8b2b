"""The crash matrix is whole: every point at which a process may die has a row in it.

The rows are the tests of this folder, each with real processes; docs/reliability.md lists them.
"""

from crash import points


def test_every_crash_point_of_the_code_is_in_the_matrix() -> None:
    tested = {points.name_of(point) for point in points.ALL_POINTS}
    assert points.points_in_code() == tested
