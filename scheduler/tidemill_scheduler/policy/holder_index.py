"""Which workers have which routing hash."""

from collections.abc import Iterable, Iterator


class HolderIndex:
    """A set of workers for each hash, as an integer with one bit for each worker."""

    def __init__(self) -> None:
        #: Hash to the bits of its holders, never zero.
        self.bits: dict[bytes, int] = {}

    def add(self, digests: Iterable[bytes], bit: int) -> None:
        """Note that the worker of ``bit`` has these."""
        bits = self.bits
        insert = bits.setdefault
        for digest in digests:
            # Most hashes have one holder: these share its one integer, of up to 160 bytes.
            if insert(digest, bit) is not bit:
                bits[digest] |= bit

    def discard(self, digests: Iterable[bytes], bit: int) -> None:
        """Note that the worker of ``bit`` has none of these."""
        bits = self.bits
        remove = bits.pop
        for digest in digests:
            held = remove(digest, 0)
            if held is not bit and (rest := held & ~bit):
                bits[digest] = rest


def bits_from(bits: int, start: int) -> Iterator[int]:
    """Yield the numbers of the bits set, from ``start`` upwards and then from 0."""
    upper = bits >> start << start
    for part in (upper, bits ^ upper):
        while part:
            lowest = part & -part
            yield lowest.bit_length() - 1
            part ^= lowest
