"""Values of command-line options; argparse tells what is wrong with one."""

import argparse
import json
import re
from decimal import Decimal
from typing import Any

from tidemill.protocol.sampling import ALL_LOGPROBS, MAX_N

#: Larger ones are mistakes, and no machine has as much.
MAX_GIB = float(1 << 30)
MAX_PORT = 65535

_SUFFIXED = re.compile(r"(\d+(?:\.\d+)?)([kmgt])", re.IGNORECASE)
_POWERS = "kmgt"


def count(text: str) -> int:
    """Read a count of 1 or more; as in vLLM ``8k`` is 8,000 and ``8K`` 8,192, up to t and T."""
    value = _number(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def context_length(text: str) -> int:
    """Read a count of 2 or more, as a sequence is a prompt and what comes of it."""
    value = count(text)
    if value < 2:
        raise argparse.ArgumentTypeError(
            f"{text} leaves no room for a prompt of one token and one of output: give 2 or more"
        )
    return value


def port(text: str) -> int:
    """Read the number of a TCP port; 0 is any that is free."""
    value = int(text)
    if not 0 <= value <= MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text} is not a port from 0 to {MAX_PORT}")
    return value


def _number(text: str) -> int:
    suffixed = _SUFFIXED.fullmatch(text.strip())
    if suffixed is None:
        return int(text)
    number, suffix = suffixed.groups()
    if suffix.islower():
        return int(Decimal(number) * 1000 ** (_POWERS.index(suffix) + 1))
    if "." in number:
        raise argparse.ArgumentTypeError(
            f"{text} is no whole number: {suffix} is a power of 1024, {suffix.lower()} of 1000"
        )
    return int(number) << 10 * (_POWERS.index(suffix.lower()) + 1)


def json_object(text: str) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:80]} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:80]} is not a JSON object")
    return value


def num_outputs(text: str) -> int:
    """Read how many outputs a job may ask for."""
    number = count(text)
    if number > MAX_N:
        raise argparse.ArgumentTypeError(f"{number} outputs are more than {MAX_N}")
    return number


def num_logprobs(text: str) -> int:
    """Read how many logprobs a token may get; -1 is all."""
    value = int(text)
    if value < ALL_LOGPROBS:
        raise argparse.ArgumentTypeError(f"{text} is neither a number of logprobs nor -1")
    return value


def share(text: str) -> float:
    """Read a share from 0 up to, not including, 1."""
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 up to 1")
    return value


def usage(text: str) -> float:
    """Read a share that is more than 0, and may be all."""
    value = float(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not a share above 0, up to 1")
    return value


def gib(text: str) -> float:
    """Read a number of GiB."""
    value = float(text)
    if not 0.0 <= value <= MAX_GIB:
        raise argparse.ArgumentTypeError(f"{text} is not a number of GiB, up to {MAX_GIB:,.0f}")
    return value


def seconds(text: str) -> float:
    """Read a number of seconds."""
    return _duration(text, "seconds")


def positive_seconds(text: str) -> float:
    """Read a number of seconds above 0."""
    value = seconds(text)
    if not value:
        raise argparse.ArgumentTypeError("0 seconds are no time at all")
    return value


def ms(text: str) -> float:
    """Read a number of milliseconds."""
    return _duration(text, "milliseconds")


def _duration(text: str, unit: str) -> float:
    value = float(text)
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of {unit}")
    return value
