"""Several versions of the function library at once, as in the middle of an upgrade."""

from collections.abc import Sequence
from typing import TypeVar

import redis

from support.strict_library import strict_source
from tidemill.protocol.functions import LIBRARY, Call, typed_error
from tidemill.protocol.library import library_name

R = TypeVar("R")


def load_versions(client: redis.Redis, versions: Sequence[int]) -> None:
    """Load versions of the library that differ in name alone, under guard."""
    for version in versions:
        client.function_load(strict_source(version), replace=True)


def drop_versions(client: redis.Redis, versions: Sequence[int]) -> None:
    """Take versions off the server again."""
    for version in versions:
        client.function_delete(library_name(version))


def run_version(client: redis.Redis, call: Call[R], version: int) -> R:
    """Execute a call as a process of another version of Tidemill does."""
    command, name, *rest = call.command
    function = str(name).replace(LIBRARY, library_name(version), 1)
    try:
        return call.parse(client.execute_command(command, function, *rest))  # type: ignore[no-untyped-call]
    except redis.ResponseError as error:
        if typed := typed_error(error):
            raise typed from error
        raise
