"""Where the server of a shard is: what to ask sentinels and cluster nodes, and what they mean.

Pure: whoever holds a connection asks, see ``routed_connection``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from redis import exceptions

from tidemill.protocol.errors import BrokerUnsupported
from tidemill.service.broker_url import Address


class Answer(NamedTuple):
    """What one seed told: the server, None while there is none, and others that may be asked."""

    server: Address | None
    seeds: tuple[Address, ...] = ()


class Routing(Protocol):
    """One way to find a server."""

    @property
    def question(self) -> tuple[str, ...]:
        """The command to send to a seed."""

    @property
    def wanted(self) -> str:
        """What is looked for, in words."""

    @property
    def fix(self) -> str:
        """What to do if seeds refuse the question."""

    def understand(self, reply: Any, asked: Address) -> Answer:
        """Read the reply of the seed that was asked."""


@dataclass(frozen=True, slots=True)
class SentinelRouting:
    """Sentinels know the master by its name."""

    master: str

    @property
    def question(self) -> tuple[str, ...]:
        """The command to send to a sentinel."""
        return ("SENTINEL", "MASTER", self.master)

    @property
    def wanted(self) -> str:
        """What is looked for, in words."""
        return f"a live master {self.master!r}"

    @property
    def fix(self) -> str:
        """What to do if sentinels refuse the question."""
        return "Check the master's name in the address, and sentinel_username and _password in it."

    def understand(self, reply: Any, asked: Address) -> Answer:
        """Read the fields of the master; one that the sentinel holds for dead is none."""
        fields = dict(zip(map(_text, reply[::2]), map(_text, reply[1::2]), strict=True))
        flags = fields["flags"].split(",")
        if "master" not in flags or {"s_down", "o_down"} & set(flags):
            return Answer(None)
        return Answer(Address(fields["ip"], int(fields["port"])))


@dataclass(frozen=True, slots=True)
class ClusterRouting:
    """Every node of a cluster knows who owns a slot."""

    slot: int

    @property
    def question(self) -> tuple[str, ...]:
        """The command to send to a node."""
        return ("CLUSTER", "SLOTS")

    @property
    def wanted(self) -> str:
        """What is looked for, in words."""
        return f"an owner of slot {self.slot}"

    @property
    def fix(self) -> str:
        """What to do if nodes refuse the question."""
        return "Use redis:// for a server that is no cluster; users need +cluster|slots."

    def understand(self, reply: Any, asked: Address) -> Answer:
        """Read the ranges of slots; the first node of each is its master."""
        server, masters = None, []
        for first, last, master, *_ in reply:
            # A node that does not know its own name leaves it to the one that reached it.
            address = Address(_text(master[0]) or asked.host, int(master[1]))
            masters.append(address)
            if first <= self.slot <= last:
                server = address
        return Answer(server, tuple(dict.fromkeys(masters)))


class Seeds:
    """Whom to ask, the ones that were given and those learned from them; used by many threads."""

    def __init__(self, given: Sequence[Address]) -> None:
        self._given = tuple(given)
        self._all = self._given
        self._turn = 0

    def in_turn(self) -> Iterator[Address]:
        """Iterate over all, each time from another one: one cut off must not have the only say."""
        seeds, self._turn = self._all, self._turn + 1
        start = self._turn % len(seeds)
        yield from (*seeds[start:], *seeds[:start])

    def learn(self, others: Sequence[Address]) -> None:
        """Ask these too from now on, in place of what was learned before."""
        self._all = tuple(dict.fromkeys((*self._given, *others)))


def told_by(error: BaseException | None) -> BaseException | None:
    """Return what the server itself said, where redis-py wraps that in a ConnectionError."""
    cause = error.__cause__ if error else None
    return cause if isinstance(cause, exceptions.RedisError) else error


def not_found(routing: Routing, failures: Sequence[tuple[Address, Exception | None]]) -> Exception:
    """Return the error for having asked every seed in vain; None stands for an empty answer."""
    errors = [told_by(error) for _, error in failures]
    refused = next((e for e in errors if isinstance(e, exceptions.AuthenticationError)), None)
    told = "; ".join(f"{seed} says: {error or 'there is none'}" for seed, error in failures)
    message = f"cannot find {routing.wanted}: {told}"
    if refused is not None and not any(error is None for error in errors):
        return refused
    if all(isinstance(error, exceptions.ResponseError) for error in errors):
        return BrokerUnsupported(message, fix=routing.fix)
    failure = exceptions.ConnectionError(message)
    failure.__cause__ = next((e for _, e in reversed(failures) if e is not None), None)
    return failure


def _text(value: bytes | None) -> str:
    return (value or b"").decode()
