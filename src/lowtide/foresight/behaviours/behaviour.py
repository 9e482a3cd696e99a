"""A row of the table, and memory of which only bounds are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """What CUDA does and the CPU does not, with its source: a file of torch and the version it was read in."""

    name: str
    does: str
    source: str
    exact: bool = True
    """Whether bytes follow from the source; else bounds do."""


class Inside(NamedTuple):
    """A block that an operator takes inside and gives back at its end: bytes expected, and their bounds."""

    bytes: int
    least: int
    most: int

    @classmethod
    def exactly(cls, n_bytes: int) -> Inside:
        """A block whose size is known."""
        return cls(n_bytes, n_bytes, n_bytes)
