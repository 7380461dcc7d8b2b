"""Work of many round trips, written once for both clients: a generator that does no I/O."""

from collections.abc import Generator, Sequence
from typing import Any, TypeAlias, TypeVar

from tidemill._reads import Read
from tidemill.protocol.functions import Call

R = TypeVar("R")

#: What a plan asks for next: a read, or functions to be called in one round trip.
Step: TypeAlias = Read[Any] | Sequence[Call[Any]]

#: Yields steps, is sent their replies, returns what they came to.
Plan: TypeAlias = Generator[Step, Any, R]
