"""Records: a behaviour of CUDA, and scratch memory with its bounds."""

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
    """Return the channels-last format if the tensor has it and is not also contiguous; else None."""
    layout = _CHANNELS_LAST.get(tensor.dim())
    if layout is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=layout):
        return None
    return layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """A behaviour of CUDA that the CPU lacks, with its source: a file of torch and the version it was read in."""

    name: str
    does: str
    source: str
    exact: bool = True
    """True if bytes follow from the source; otherwise bounds do."""


class ScratchBlock(NamedTuple):
    """A block that an operator allocates and frees internally: expected bytes, and their bounds."""

    bytes: int
    least: int
    most: int
    through: int | None = None
    """Number of later blocks allocated before this one is freed; None if it lasts to the operator's end."""
    first: bool = False
    """True if the block is allocated before the results; then it lasts to the operator's end."""

    @classmethod
    def exactly(cls, n_bytes: int, through: int | None = None, *, first: bool = False) -> ScratchBlock:
        """Return a block of known size."""
        return cls(n_bytes, n_bytes, n_bytes, through, first)


CONTIGUOUS = torch.contiguous_format


def copies(*tensors: Tensor, layout: torch.memory_format = CONTIGUOUS, first: bool = False) -> list[ScratchBlock]:
    """Return a block for the copy of each tensor that is not contiguous in this layout."""
    away = (t for t in tensors if not t.is_contiguous(memory_format=layout))
    return [ScratchBlock.exactly(t.numel() * t.element_size(), first=first) for t in away]
