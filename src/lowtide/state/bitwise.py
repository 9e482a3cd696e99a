"""Bitwise comparison of tensors, and hashes for comparing contents that do not exist at the same time."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lowtide._torch.distributed import get_own_part, is_wrapping
from lowtide._torch.fake_modes import is_fake

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.runtime.saved_fields import Geometry

PIECE = 2**18
"""Number of elements processed at a time: few, so that little memory is needed, but enough that a recording gets few
events.
"""

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by element size in bytes."""


def identical(one: Tensor, other: Tensor, view: Geometry | None = None) -> bool:
    """Return True if two tensors have the same strides and bits; signed zeros and NaNs are compared by bits, too.

    With `view`, only this view of both tensors is compared.
    """
    if is_wrapping(type(one)) and is_wrapping(type(other)):  # torch would compare them in all processes
        one, other = get_own_part(one), get_own_part(other)
    if view is not None:
        if not (_contains_view(one, view) and _contains_view(other, view)):
            return False
        one, other = one.as_strided(*view), other.as_strided(*view)
    return one.stride() == other.stride() and has_same_contents(one, other)


def has_same_contents(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same dtype, shape and bits; strides may differ.

    Fake tensors have no bits: two fake tensors are equal if dtype and shape are equal.
    """
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if (one.is_conj(), one.is_neg()) != (other.is_conj(), other.is_neg()):
        return False
    return (is_fake(one) and is_fake(other)) or torch.equal(_integers(one), _integers(other))


def content_hash(tensor: Tensor) -> int:
    """Return a hash of a strided tensor's contents, which depends on their order.

    Strides do not matter. On the CPU no torch memory is allocated, because a step may have left none. `Tensor.numpy` is
    not used, because the program's tensor could then not be resized any more (torch 2.13), and a later recording would
    not see its memory freed.
    """
    integers = _integers(tensor)
    return _digest(np.from_dlpack(integers)) if integers.device.type == "cpu" else _sum_weighted(integers)


def _digest(array: Any) -> int:
    """Hash the contents of a NumPy array."""
    hasher = hashlib.sha1(usedforsecurity=False)
    for piece in [array.reshape(-1)] if array.flags.c_contiguous else _pieces(array):
        if piece.size:
            # an expanded array, a view with strides of 0
            hasher.update(piece if piece.flags.c_contiguous else piece.copy())
    return int.from_bytes(hasher.digest()[:8], "little")


def _sum_weighted(integers: Tensor) -> int:
    """Sum words of 4 bytes, each weighted by its position.

    Words of 8 bytes are not used, because two sign bits would cancel each other at the top of the sum.
    """
    weights = _weights(min(PIECE, integers.numel()) * max(1, integers.element_size() // 4), integers.device)
    sums: list[Tensor] = []
    for piece in _pieces(integers):
        words = _words(piece)
        sums.append(torch.mul(words, weights[: words.numel()]).sum())
    total = 0
    for number in torch.stack(sums).tolist() if sums else ():
        total = (total * _FACTOR + number) % 2**64
    return total


_FACTOR = 0x9E3779B97F4A7C15
"""An odd number with random-looking bits (SplitMix64)."""


def _weights(count: int, device: torch.device) -> Tensor:
    """Return `count` odd, random-looking numbers, the same at each call."""
    weights = torch.arange(1, count + 1, device=device).mul_(_FACTOR - 2**64)
    weights ^= weights >> 31
    return weights.mul_(_FACTOR - 2**64).bitwise_or_(1)


def _words(piece: Tensor) -> Tensor:
    """Return the contents of `piece` as words of 4 bytes, or unchanged if their size is not a multiple of 4 bytes."""
    if piece.nbytes % 4:
        return piece
    piece = piece.contiguous()
    if piece.storage_offset() * piece.element_size() % 4:
        piece = piece.clone()
    return piece.view(torch.uint8).view(torch.int32)


def _pieces(array: Any) -> Iterator[Any]:
    """Yield the elements of a tensor or NumPy array in order, at most `PIECE` at a time; copies if noncontiguous."""
    size = math.prod(array.shape)
    if size <= PIECE:
        yield array.reshape(-1)
        return
    rows = max(1, PIECE * array.shape[0] // size)
    for first in range(0, array.shape[0], rows):
        piece = array[first : first + rows]
        yield from _pieces(piece) if math.prod(piece.shape) <= PIECE else _pieces(piece[0])


def _integers(tensor: Tensor) -> Tensor:
    """Return the bits of `tensor` as integers; complex numbers get one more dimension."""
    tensor = tensor.detach().resolve_conj().resolve_neg()  # lazy conj and neg have no bits of their own
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor if tensor.dtype is torch.bool else tensor.view(_AS_INTEGERS[tensor.element_size()])


def _contains_view(tensor: Tensor, view: Geometry) -> bool:
    """Return True if all elements of `view` lie within the storage of `tensor`."""
    shape, strides, offset = view
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return 0 in shape or (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()
