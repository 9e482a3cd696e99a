"""A row of the table, and memory of which only bounds are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

READ_IN = "2.13"
"""The version of torch in whose sources the behaviours were read."""

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(tensor: Tensor) -> torch.memory_format | None:
    """That layout, of its dimensions, if the tensor has it and not also the other; else None."""
    layout = _CHANNELS_LAST.get(tensor.dim())
    if layout is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=layout):
        return None
    return layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """What CUDA does and the CPU does not, with its source: a file of torch and the version it was read in."""

    name: str
    does: str
    source: str
    exact: bool = True
    """Whether bytes follow from the source; else bounds do."""


class ScratchBlock(NamedTuple):
    """A block that an operator takes inside and gives back: bytes expected, and their bounds."""

    bytes: int
    least: int
    most: int
    through: int | None = None
    """How many of the blocks after it are taken before it is given back; None where it lasts to the operator's end."""
    first: bool = False
    """Whether it is taken before the results; then it lasts to the operator's end."""

    @classmethod
    def exactly(cls, n_bytes: int, through: int | None = None, *, first: bool = False) -> ScratchBlock:
        """A block whose size is known."""
        return cls(n_bytes, n_bytes, n_bytes, through, first)


CONTIGUOUS = torch.contiguous_format


def copies(*tensors: Tensor, layout: torch.memory_format = CONTIGUOUS, first: bool = False) -> list[ScratchBlock]:
    """A block for each of these that does not lie like that."""
    away = (t for t in tensors if not t.is_contiguous(memory_format=layout))
    return [ScratchBlock.exactly(t.numel() * t.element_size(), first=first) for t in away]
