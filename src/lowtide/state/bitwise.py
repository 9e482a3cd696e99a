"""Whether tensors are the same bit for bit, and a number that tells apart contents that are not there at once."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.runtime.saved_values import Geometry

PIECE = 2**18
"""Elements that are looked at together: few enough for little memory, many enough for few events in a recording."""

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element."""


def identical(one: Tensor, other: Tensor, view: Geometry | None = None) -> bool:
    """Whether two tensors, or this view of both, are the same bit for bit (signed zeros and NaNs too), with the same
    strides.
    """
    if view is not None:
        if not (_reaches(one, view) and _reaches(other, view)):
            return False
        one, other = one.as_strided(*view), other.as_strided(*view)
    if one.dtype != other.dtype or one.shape != other.shape or one.stride() != other.stride():
        return False
    if (one.is_conj(), one.is_neg()) != (other.is_conj(), other.is_neg()):
        return False
    return torch.equal(_integers(one), _integers(other))


def number_of(tensor: Tensor) -> int:
    """Give a number that hardly any other content has, nor the same one in another order. Of a strided tensor.

    The strides do not matter. On a CPU no memory of torch is taken: the number is of steps that may have none left.
    """
    integers = _integers(tensor)
    return _digest(integers.numpy()) if integers.device.type == "cpu" else _weighted_sum(integers)


def _digest(array: Any) -> int:
    """Hash the contents of a NumPy array."""
    found = hashlib.sha1(usedforsecurity=False)
    for piece in [array.reshape(-1)] if array.flags.c_contiguous else _pieces(array):
        if piece.size:
            found.update(piece)
    return int.from_bytes(found.digest()[:8], "little")


def _weighted_sum(integers: Tensor) -> int:
    """Add up words of 4 bytes, each as often as its place says.

    Not of 8: two sign bits would cancel each other at the end of the sum.
    """
    weights = _weights(min(PIECE, integers.numel()) * max(1, integers.element_size() // 4), integers.device)
    sums: list[Tensor] = []
    for piece in _pieces(integers):
        words = _words(piece)
        sums.append(torch.mul(words, weights[: words.numel()]).sum())
    found = 0
    for number in torch.stack(sums).tolist() if sums else ():
        found = (found * _FACTOR + number) % 2**64
    return found


_FACTOR = 0x9E3779B97F4A7C15
"""Odd, with bits that look random (SplitMix64)."""


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers that look random."""
    weights = torch.arange(1, count + 1, device=device).mul_(_FACTOR - 2**64)
    weights ^= weights >> 31
    return weights.mul_(_FACTOR - 2**64).bitwise_or_(1)


def _words(piece: Tensor) -> Tensor:
    """What is in it in words of 4 bytes; as it is where it ends within one."""
    if piece.nbytes % 4:
        return piece
    piece = piece.contiguous()
    if piece.storage_offset() * piece.element_size() % 4:
        piece = piece.clone()
    return piece.view(torch.uint8).view(torch.int32)


def _pieces(array: Any) -> Iterator[Any]:
    """Elements of a tensor or NumPy array in their order, not too many at once: copies where they do not lie so."""
    size = math.prod(array.shape)
    if size <= PIECE:
        yield array.reshape(-1)
        return
    rows = max(1, PIECE * array.shape[0] // size)
    for first in range(0, array.shape[0], rows):
        piece = array[first : first + rows]
        yield from _pieces(piece) if math.prod(piece.shape) <= PIECE else _pieces(piece[0])


def _integers(tensor: Tensor) -> Tensor:
    """The same memory as integers; of complex numbers with a dimension more."""
    tensor = tensor.detach().resolve_conj().resolve_neg()  # else there are no bits to see
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor if tensor.dtype is torch.bool else tensor.view(_AS_INTEGERS[tensor.element_size()])


def _reaches(tensor: Tensor, view: Geometry) -> bool:
    """Whether all elements of `view` are in the memory of `tensor`."""
    shape, strides, offset = view
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return 0 in shape or (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()
