"""Where the driver puts new segments: it decides between free blocks of equal size, and is not documented."""

from __future__ import annotations

import random
from collections.abc import Iterator

CHUNK = 32 * 2**20
"""Bytes of address space that the driver takes at a time."""

_PAGE = 2 * 2**20
_TOP = 2**46
_APART = 2**34


class DriverAddresses:
    """Address space is taken from the top downwards in whole chunks; what is left of one is used first, lowest first.

    Read off recorded memory snapshots, of other programs on other cards: it puts 92, 99 and 100 of a hundred pairs of
    new segments into their recorded order where 9, 53 and 152 segments were recorded (`t1`, `t3` and `t7` of the
    allocator's traces, up to the first release), as simply descending addresses do 100, 96 and 98; of the 7 segments of
    `t8` 33.
    """

    def __init__(self) -> None:
        self._bottom = _TOP
        self._rests: list[tuple[int, int]] = []

    def __call__(self, n_bytes: int) -> int:
        """The address of a new segment."""
        size = -(-n_bytes // _PAGE) * _PAGE
        for place, (address, rest) in enumerate(self._rests):
            if rest >= size:
                self._rests[place : place + 1] = [(address + size, rest - size)] if rest > size else []
                return address
        taken = -(-size // CHUNK) * CHUNK
        self._bottom -= taken
        if taken > size:
            self._rests.insert(0, (self._bottom + size, taken - size))
        return self._bottom


def others(n_shuffles: int = 3) -> Iterator[Iterator[int]]:
    """Orders that are as good as any where nothing is known: ascending, descending, and some at random."""
    yield (number * _APART for number in range(1, 2**20))
    yield (number * _APART for number in range(2**20, 0, -1))
    for seed in range(n_shuffles):
        yield _shuffled(random.Random(seed))


def _shuffled(draw: random.Random) -> Iterator[int]:
    taken = set()
    while True:
        number = draw.randrange(1, 2**28)
        if number not in taken:
            taken.add(number)
            yield number * _APART
