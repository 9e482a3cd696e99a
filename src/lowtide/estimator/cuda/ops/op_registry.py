"""Registry of operators that behave differently on CUDA than on a CPU, with torch's source file for each difference.

The files in this folder register functions with the decorators below, next to the source of each number.
`op_table.py` imports all of these files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

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
    """A difference between CUDA and the CPU, with its source: a file of torch and torch's version."""

    name: str
    does: str
    source: str
    exact: bool = True
    """True if the source states the bytes, False if it states only bounds."""

    def __post_init__(self) -> None:
        BEHAVIOURS.append(self)


BEHAVIOURS: list[Behaviour] = []


class ScratchBlock(NamedTuple):
    """Memory that an operator allocates and frees internally: expected bytes, with a lower and an upper bound."""

    bytes: int
    least: int
    most: int
    through: int | None = None
    """Number of later blocks allocated before this one is freed; None if it lasts to the operator's end."""
    first: bool = False
    """True if the block is allocated before the results; then it lasts to the operator's end."""

    @classmethod
    def exactly(cls, n_bytes: int, through: int | None = None, *, first: bool = False) -> ScratchBlock:
        """Return a block of exactly `n_bytes`, freed after `through` further blocks, or at the operator's end if None.

        With `first`, the block is allocated before the operator's results.
        """
        return cls(n_bytes, n_bytes, n_bytes, through, first)


CONTIGUOUS = torch.contiguous_format


def copies(*tensors: Tensor, layout: torch.memory_format = CONTIGUOUS, first: bool = False) -> list[ScratchBlock]:
    """Return a block for a copy of each tensor that is not contiguous in the memory format `layout`.

    With `first`, the copies are allocated before the operator's results.
    """
    away = (t for t in tensors if not t.is_contiguous(memory_format=layout))
    return [ScratchBlock.exactly(t.numel() * t.element_size(), first=first) for t in away]


# --- registration ----------------------------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(slots=True)
class CudaOp:
    """Differences of one operator on CUDA. A field is None if the operator behaves as on a CPU."""

    behaviours: list[Behaviour] = field(default_factory=list)
    scratch: Callable[[Any, Any, list[Tensor]], list[ScratchBlock]] | None = None
    """(args, kwargs, results) -> the blocks that the operator allocates and frees internally."""
    layout: Callable[[Any, Any], Any] | None = None
    """(args, results) -> the results in CUDA's memory layout."""
    results: Callable[..., Any] | None = None
    """Function that returns the results, if torch can't run the operator on fake tensors."""
    order: tuple[int, ...] | None = None
    """Allocation order of the results."""
    on_host: range | None = None
    """Positions of results that are on the host."""


CUDA_OPS: dict[Any, CudaOp] = {}
KERNELS: dict[str, Callable[..., Any]] = {}
"""Kernels by operator name, for autograd on the GPU."""


def cuda_op(*ops: Any, of: Behaviour, part: Literal["scratch", "layout", "results"] = "scratch") -> Callable[[F], F]:
    """Register the decorated function as the `CudaOp` field `part` of all `ops`, derived from the behaviour `of`."""

    def register(function: F) -> F:
        for op in ops:
            setattr(ensure_entry(op, of), part, function)
        return function

    return register


def ensure_entry(op: Any, of: Behaviour) -> CudaOp:
    """Return the entry of `CUDA_OPS` for `op`, created if missing, and append `of` to its behaviours."""
    entry = CUDA_OPS.setdefault(op, CudaOp())
    entry.behaviours.append(of)
    return entry


def cuda_kernel(*names: str) -> Callable[[F], F]:
    """Register the decorated function as the kernel that autograd calls for the operators `names`."""

    def register(function: F) -> F:
        KERNELS.update(dict.fromkeys(names, function))
        return function

    return register
