"""Logging set-up: one line per record on standard error, with nothing private in it.

Prompts and outputs never go into a log; a record that must identify one uses ``fingerprint``.
"""

import hashlib
import logging
import re
import sys
import time
from typing import TextIO

_FORMAT = "%(asctime)s %(levelname)s %(process_name)s[%(process)d] %(name)s: %(message)s"
#: Keeps an exception that quotes its input from flooding the log.
_MAX_LINE_CHARS = 8192

#: Credentials in addresses, bearer tokens, our API keys and webhook secrets.
_SECRETS = re.compile(
    r"(?P<keep>://)[^/\s@]+(?=@)|(?P<scheme>(?i:bearer) )\S+|(?P<key>tmk_\w+?_|whsec_)[\w+/=-]+"
)


def setup_logging(level: str, process_name: str, *, stream: TextIO | None = None) -> None:
    """Send the records of the whole process, from ``level`` up, to ``stream`` (stderr).

    Replaces what an earlier call or a library set up.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(OneLineFormatter(process_name))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)


def fingerprint(text: str) -> str:
    """A name for a text that does not tell its content: length and start of its digest."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"len={len(text)} sha256={digest}"


class OneLineFormatter(logging.Formatter):
    """UTC time, level, process, logger and message; line breaks are escaped, secrets blanked."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self, process_name: str) -> None:
        super().__init__(_FORMAT, defaults={"process_name": process_name})

    def format(self, record: logging.LogRecord) -> str:
        """The record on one line, its traceback included."""
        line = _SECRETS.sub(_blank, super().format(record))
        if len(line) > _MAX_LINE_CHARS:
            # The end of a traceback names the error, so both ends are kept.
            half = _MAX_LINE_CHARS // 2
            line = f"{line[:half]} ... {line[-half:]}"
        return line.replace("\r", "\\r").replace("\n", "\\n")


def _blank(match: re.Match[str]) -> str:
    return "".join(part for part in match.groups() if part) + "***"
