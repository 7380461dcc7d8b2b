"""Figures that tests measure and nobody asserts: told at the end of a run."""

from collections.abc import Iterator

import pytest

MEASURED = "measured"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests have recorded as ``record_property(MEASURED, text)``."""
    lines = sorted(_lines(terminalreporter))
    if lines:
        terminalreporter.section("measured")
    for line in lines:
        terminalreporter.write_line(line)


def _lines(terminalreporter: pytest.TerminalReporter) -> Iterator[str]:
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == MEASURED:
                yield str(value)
