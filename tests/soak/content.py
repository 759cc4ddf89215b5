"""Bytes by position: what a stream carries at any offset, cheap to make and to compare."""

from helpers import pattern

PERIOD = 1_000_003      # no multiple of anything that a buffer's size is
LONGEST = 1 << 18       # bytes that one slice may have
SPREAD = 48_611         # between the beginnings of streams

_BLOCK = pattern(PERIOD)
_BLOCK += _BLOCK[:LONGEST]


class ContentFault(Exception):
    """Bytes came that nobody sent in this place."""


class Stream:
    """One direction of one connection: `key` says which, `position` how far it is."""

    def __init__(self, key):
        self.start = key * SPREAD % PERIOD
        self.position = 0

    def take(self, size):
        """The next `size` bytes, at most LONGEST."""
        at = (self.start + self.position) % PERIOD
        self.position += size
        return _BLOCK[at:at + size]

    def verify(self, data):
        """Compares what came with what comes next here; ContentFault names the first difference."""
        for at in range(0, len(data), LONGEST):
            part = data[at:at + LONGEST]
            position = self.position
            expected = self.take(len(part))
            if part != expected:
                wrong = next(i for i, pair in enumerate(zip(part, expected)) if pair[0] != pair[1])
                raise ContentFault(
                    f"at offset {position + wrong}: {bytes(part[wrong:wrong + 16]).hex()} "
                    f"is not {expected[wrong:wrong + 16].hex()}")
