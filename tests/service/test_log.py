"""Log lines: one per record, dated in UTC, without secrets."""

import io
import logging
import re
import warnings
from collections.abc import Iterator

import pytest

from tidemill.service.log import fingerprint, setup_logging


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    stream = io.StringIO()
    # Handlers of the test runner stay out of the way while ours is under test.
    for handler in before:
        root.removeHandler(handler)
    setup_logging("INFO", "scheduler", stream=stream)
    yield stream
    logging.captureWarnings(False)
    root.handlers[:] = before
    root.setLevel(level)


def test_a_record_is_one_dated_line_naming_its_process(lines: io.StringIO) -> None:
    logging.getLogger("tidemill_scheduler.daemon").info("leads with epoch %d", 7)
    pattern = (
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO scheduler\[\d+\] tidemill_scheduler\.daemon: "
        r"leads with epoch 7\n"
    )
    assert re.fullmatch(pattern, lines.getvalue())


def test_a_traceback_stays_on_the_line_of_its_record(lines: io.StringIO) -> None:
    try:
        raise ValueError("two\nlines\rand more")
    except ValueError:
        logging.getLogger("x").exception("failed")
    [line] = lines.getvalue().splitlines()
    assert "Traceback" in line
    assert r"ValueError: two\nlines\rand more" in line


def test_records_below_the_level_are_dropped(lines: io.StringIO) -> None:
    logging.getLogger("x").debug("detail")
    assert lines.getvalue() == ""


def test_a_second_set_up_replaces_the_first(lines: io.StringIO) -> None:
    other = io.StringIO()
    setup_logging("INFO", "worker", stream=other)
    logging.getLogger("x").info("once")
    assert lines.getvalue() == ""
    assert other.getvalue().count("once") == 1


def test_warnings_go_to_the_log_too(lines: io.StringIO) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        setup_logging("INFO", "worker", stream=lines)
        warnings.warn("careful", UserWarning, stacklevel=1)
        logging.captureWarnings(False)
    assert "careful" in lines.getvalue()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://user:hunter2@host/0", "redis://***@host/0"),
        ("Authorization: Bearer hunter2", "Authorization: Bearer ***"),
        ("authorization: bearer hunter2", "authorization: bearer ***"),
        ("key tmk_ab12_hunter2", "key tmk_ab12_***"),
        ("whsec_hunter2+/=", "whsec_***"),
        ("https://example.com/a@b", "https://example.com/a@b"),
    ],
)
def test_secrets_are_blanked(lines: io.StringIO, text: str, shown: str) -> None:
    logging.getLogger("x").warning("seen: %s", text)
    assert lines.getvalue().endswith(f"seen: {shown}\n")


def test_a_secret_at_the_cut_of_a_long_line_is_blanked_before_the_cut(lines: io.StringIO) -> None:
    logging.getLogger("x").info("%s", "redis://user:hunter2@host/" * 2000)
    [line] = lines.getvalue().splitlines()
    assert len(line) < 8300
    assert "hunter2" not in line


def test_a_fingerprint_tells_texts_apart_and_not_what_they_say() -> None:
    assert fingerprint("abc") == "len=3 sha256=ba7816bf"  # FIPS 180-2, example B.1
    assert "secret" not in fingerprint("secret")
    assert fingerprint("\ud800").startswith("len=1 ")
