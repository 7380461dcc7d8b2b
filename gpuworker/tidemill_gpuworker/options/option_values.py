"""Values of command-line options; argparse tells what is wrong with one."""

import argparse

from tidemill.protocol.sampling import ALL_LOGPROBS, MAX_N


def count(text: str) -> int:
    """Read a count of 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
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


def gib(text: str) -> float:
    """Read a number of GiB."""
    value = float(text)
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of GiB")
    return value


def seconds(text: str) -> float:
    """Read a number of seconds."""
    return _duration(text, "seconds")


def ms(text: str) -> float:
    """Read a number of milliseconds."""
    return _duration(text, "milliseconds")


def _duration(text: str, unit: str) -> float:
    value = float(text)
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of {unit}")
    return value
