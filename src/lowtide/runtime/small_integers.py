"""Indices of pooling and similar operators, stored in as few bytes as they need.

Max pooling saves the place of each maximum in its input's plane, in eight bytes. At one point of the output, the places
of all examples lie in the same window. So the lowest of them is stored once, and for each example the distance from it:
one byte for a window of 3 x 3 in a plane of up to 126 columns, two bytes for nearly any other.

Nothing is guessed: lowest and highest are computed in every step, on a GPU at the price of waiting for the device, and
indices that need as much memory as before are kept unchanged.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lowtide._torch.fake_modes import is_fake
from lowtide._torch.tensors import AS_ARRAY
from lowtide.planner.address_nodes import INDICES
from lowtide.runtime.bitmask import LEAST_BYTES, is_whole
from lowtide.runtime.recipes import CannotRecompute, Recipe, TooSmall

if TYPE_CHECKING:
    from torch import Tensor

LEADING: Final = {3: 1, 4: 2, 5: 2}
"""Dimensions of batch and channels, by the number of all dimensions of a pooling layer's result."""
SIZES: Final = ((torch.uint8, 2**8), (torch.int16, 2**15), (torch.int32, 2**31))
"""Integer types, the smallest first, each with the number of integers from 0 on that it holds."""
LOWEST: Final = torch.int32
"""Type of the lowest index at each point."""


def pack_indices(tensor: Tensor) -> dict[str, Any]:
    """Pack indices of pooling in as few bytes as they need; return the arguments with which they are restored.

    Raises CannotRecompute if `tensor` does not hold such indices, or if packing them saves too little.
    """
    if tensor.dtype is not torch.int64 or tensor.dim() not in LEADING or tensor.requires_grad or not is_whole(tensor):
        raise CannotRecompute("it does not hold indices as pooling saves them")
    if tensor.nbytes < LEAST_BYTES:
        raise TooSmall("too small to gain anything")
    dims = tuple(range(LEADING[tensor.dim()]))
    if is_fake(tensor):
        dtype, lowest = torch.int16, None
    else:
        lowest, highest = _find_extremes(tensor, dims)
        dtype = _choose_smallest_type(lowest, highest)
    n_points = math.prod(tensor.shape[len(dims) :])
    n_bytes = LOWEST.itemsize * n_points + dtype.itemsize * tensor.numel()
    if 2 * n_bytes > tensor.nbytes:
        raise TooSmall("its indices need more than half of their memory")
    bits = torch.empty(n_bytes, dtype=torch.uint8, device=tensor.device)
    if lowest is not None:
        base, offsets = _split_bits(bits, tensor.shape, tensor.stride(), dtype)
        if isinstance(lowest, torch.Tensor):
            base.copy_(lowest)
            torch.sub(tensor, lowest, out=offsets)
        else:
            AS_ARRAY(base)[:] = lowest
            np.subtract(np.from_dlpack(tensor), lowest, out=AS_ARRAY(offsets), casting="unsafe")
    return {"bits": bits, "shape": tensor.shape, "stride": tensor.stride(), "dtype": dtype}


def _find_extremes(tensor: Tensor, dims: tuple[int, ...]) -> tuple[Any, Any]:
    """Return the lowest and the highest index over the dimensions `dims`, at each point of the others.

    On a CPU these are NumPy arrays, because recordings of memory do not count those.
    """
    if tensor.device.type == "cpu":
        array = np.from_dlpack(tensor)
        return array.min(axis=dims, keepdims=True), array.max(axis=dims, keepdims=True)
    return tensor.amin(dims, keepdim=True), tensor.amax(dims, keepdim=True)


def _choose_smallest_type(lowest: Any, highest: Any) -> torch.dtype:
    """Return the smallest integer dtype that can hold the differences between the indices and the `lowest` ones.

    `lowest` and `highest` are the smallest and largest index at each position of the pooled output. Raises
    CannotRecompute if no dtype in `SIZES` can, or if an index is negative or at least 2**31.
    """
    farthest, first, last = int((highest - lowest).max()), int(lowest.min()), int(highest.max())
    for dtype, n in SIZES:
        if farthest < n and 0 <= first <= last < 2**31:
            return dtype
    raise CannotRecompute("its indices lie too far apart")


def _split_bits(bits: Tensor, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the two parts of packed indices: the lowest index at each point, and each index's distance from it."""
    points = shape[LEADING[len(shape)] :]
    n_bytes = LOWEST.itemsize * math.prod(points)
    base = bits[:n_bytes].view(LOWEST).view([1] * LEADING[len(shape)] + [*points])
    return base, bits[n_bytes:].view(dtype).as_strided(shape, stride, bits[n_bytes:].view(dtype).storage_offset())


def _restore_indices(*, bits: Tensor, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Restore the indices from the arguments that `pack_indices` returned for them."""
    indices = torch.empty_strided(shape, stride, dtype=torch.int64, device=bits.device)
    if not is_fake(bits):
        base, offsets = _split_bits(bits, shape, stride, dtype)
        indices.copy_(offsets).add_(base)
    return indices


FROM_OFFSETS: Final = Recipe(
    node=INDICES,
    function=_restore_indices,
    operands=(),
    lists=frozenset(),
    optional=frozenset(),
    constants=("bits", "shape", "stride", "dtype"),
    several=False,
)
