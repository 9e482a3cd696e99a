"""Masks stored with one bit per element.

A mask marks the elements that stay. Dropout on a CPU, and attention without a fused kernel, multiply by a mask of
numbers that no autograd node made: each element is 0 or 1 / (1 - p). Dropout on a GPU, `where` and `masked_fill` save
booleans, a byte each. One bit holds the same information: 1/32 of a float32 mask, 1/8 of a boolean one.

Nothing is guessed: every element is read in every step, and a tensor with a third value is kept unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lowtide._torch.fake_modes import is_fake
from lowtide._torch.tensors import AS_ARRAY, base_of, is_plain
from lowtide.planner.address_nodes import MASK
from lowtide.runtime.recipes import CannotRecompute, Recipe, TooSmall

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

LEAST_BYTES = 4096
"""Smallest mask that is stored as bits; smaller ones are kept."""

AT_ONCE = 2**17
"""Number of elements per chunk on a CPU: a multiple of 8, few enough to stay in its cache."""
MANY_AT_ONCE = 2**23
"""Number of elements per chunk on a GPU, few enough that temporaries need little memory."""

_INTEGERS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by element size. Numbers are compared as integers of the same bits, so that -0.0 is not 0.0."""

_GATHER: Final = 0x0102040810204080
"""Factor that packs eight bytes, each 0 or 1, into bits: the highest byte of the product has the first byte as its
lowest bit, and so on.
"""


def pack_mask(mask: Tensor) -> dict[str, Any]:
    """Pack `mask` with one bit per element; return the arguments with which `mask_of` restores it.

    Raises CannotRecompute, with the reason, if that is impossible, for example because of a third value.
    """
    if not may_be_a_mask(mask):
        raise CannotRecompute("its dtype is not one of masks")
    bits = allocate_bits(mask)
    number = 1 if is_fake(mask) else fill(bits, mask)
    return {"bits": bits, "shape": mask.shape, "stride": mask.stride(), "dtype": mask.dtype, "number": number}


def pack_signs(tensor: Tensor) -> dict[str, Any]:
    """Pack the signs of `tensor` with one bit per element; return arguments for `mask_of`.

    With them `mask_of` returns 1 wherever `tensor` is above 0 or NaN, and 0 elsewhere. Raises CannotRecompute, with the
    reason, if that is impossible.
    """
    if not is_whole(tensor):
        raise CannotRecompute("it is a view of larger memory")
    bits = allocate_bits(tensor)
    if not is_fake(tensor):
        flat = tensor.detach().as_strided((tensor.numel(),), (1,))
        for elements, eighths in _iterate_chunks(flat):
            _pack_booleans(_find_positive(flat[elements]), bits[eighths])
    return {"bits": bits, "shape": tensor.shape, "stride": tensor.stride(), "dtype": tensor.dtype, "number": None}


def _find_positive(flat: Tensor) -> Tensor:
    """Return a boolean tensor that is True where `flat` is above 0 or NaN."""
    if flat.device.type != "cpu" or flat.dtype is torch.bfloat16:
        return (flat <= 0).logical_not_()
    is_not = _view_as_array(flat) <= 0  # memory of NumPy, 1/8 MiB at most
    return torch.from_numpy(np.logical_not(is_not, out=is_not))


def allocate_bits(tensor: Tensor) -> Tensor:
    """Return an uninitialized tensor of bytes, with one bit for each element of `tensor`. Raises TooSmall if `tensor`
    is so small that packing it would save hardly any memory.
    """
    if tensor.nbytes < LEAST_BYTES:
        raise TooSmall("too small to gain anything")
    return torch.empty(-(-tensor.numel() // 8), dtype=torch.uint8, device=tensor.device)


def may_be_a_mask(tensor: Tensor) -> bool:
    """Return True if `tensor` may be a mask, without reading its elements."""
    numbers = tensor.is_floating_point() and tensor.element_size() in _INTEGERS and tensor.device.type == "cpu"
    return not tensor.requires_grad and (numbers or tensor.dtype is torch.bool) and is_whole(tensor)


def is_whole(tensor: Tensor) -> bool:
    """Return True if the tensor's elements fill its whole storage."""
    return is_plain(tensor) and base_of(tensor) is None and tensor.nbytes == tensor.untyped_storage().nbytes()


def fill(bits: Tensor, mask: Tensor) -> int:
    """Set one bit in `bits` for each nonzero element of `mask`; return the value that all nonzero elements have.

    The value is returned as the integer that has the same bits; for a boolean mask, 1. Raises CannotRecompute if the
    nonzero elements differ, or if all elements of a numeric mask are zero.
    """
    flat, number = mask.as_strided((mask.numel(),), (1,)), 0
    if mask.dtype is torch.bool:
        for elements, eighths in _iterate_chunks(flat):
            _pack_booleans(flat[elements], bits[eighths])
        return 1
    numbers, into = _view_as_array(flat.view(_INTEGERS[mask.element_size()])), AS_ARRAY(bits)
    for elements, eighths in _iterate_chunks(flat):
        part = numbers[elements]
        number = number or _find_first_number(part[:64]) or _find_first_number(part)
        stays = part == number if number else part != 0  # only zeros so far
        if np.count_nonzero(stays) != np.count_nonzero(part):
            raise CannotRecompute("it has more than two values")
        into[eighths] = np.packbits(stays, bitorder="little")
    if not number:
        raise CannotRecompute("it is all zeros")
    return number


def _view_as_array(tensor: Tensor) -> NDArray[Any]:
    """Return a CPU tensor's memory as a NumPy array, for reading only.

    `Tensor.numpy` would not do: a tensor that it was called on, here one of the model's, can't be resized any more
    (torch 2.13), and a recording takes its memory for a foreign allocation.
    """
    return np.from_dlpack(tensor)


def _find_first_number(part: NDArray[Any]) -> int:
    """Return the first element of `part` that is not 0; 0 if there is none."""
    return int(part[(part != 0).argmax()])


def mask_of(
    *, bits: Tensor, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, number: int | None
) -> Tensor:
    """Restore a mask from its `bits`: an element whose bit is set gets the bit pattern `number`, or 1 without one."""
    mask = torch.empty_strided(shape, stride, dtype=dtype, device=bits.device)
    if is_fake(bits):
        return mask
    flat = mask.as_strided((mask.numel(),), (1,))
    if bits.device.type == "cpu":
        _fill_from_table(bits, flat, number)
        return mask
    table = _make_boolean_table(bits.device).view(torch.int64).view(-1)
    for elements, eighths in _iterate_chunks(flat):
        part = flat[elements]
        part.copy_(table.take(bits[eighths].long()).view(torch.bool)[: len(part)])
    return mask


def _fill_from_table(bits: Tensor, flat: Tensor, number: int | None) -> None:
    """Fill the one-dimensional mask `flat` on the CPU from its `bits`, by a table with eight elements per byte
    value.
    """
    if number is None or flat.dtype is torch.bool:
        number = int.from_bytes(AS_ARRAY(torch.ones(1, dtype=flat.dtype).view(torch.uint8)).tobytes(), "little")
    size, whole = flat.element_size(), flat.numel() // 8
    table, memory = _make_byte_table(size, number), AS_ARRAY(flat.view(torch.uint8))
    rows = memory[: 8 * size * whole].reshape(whole, 8 * size)
    # Without "clip" numpy would fill a temporary array of that size first. No index is out of bounds.
    np.take(table, AS_ARRAY(bits[:whole]), axis=0, out=rows, mode="clip")
    if rest := len(memory) - rows.size:
        memory[-rest:] = table[int(bits[-1])][:rest]


@lru_cache(maxsize=64)
def _make_byte_table(size: int, number: int) -> NDArray[np.uint8]:
    """Make a table of 256 rows: for each byte value, one element of `size` bytes per bit, lowest bit first.

    The element is `number` where the bit is 1, else 0. The table is returned as bytes, in shape [256, 8 * size].
    """
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    elements: NDArray[np.uint8] = (bits.astype(f"i{size}") * np.array(number, dtype=f"i{size}")).view(np.uint8)
    return elements


def _iterate_chunks(flat: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield, for each chunk of a mask, a slice of its elements and a slice of the bytes that hold their bits."""
    at_once = AT_ONCE if flat.device.type == "cpu" else MANY_AT_ONCE
    for first in range(0, len(flat), at_once):
        last = min(first + at_once, len(flat))
        yield slice(first, last), slice(first // 8, -(-last // 8))


def _pack_booleans(stays: Tensor, bits: Tensor) -> None:
    """Pack the booleans `stays` into `bits`, eight per byte, the first one in the lowest bit."""
    if stays.device.type == "cpu":
        AS_ARRAY(bits)[:] = np.packbits(_view_as_array(stays), bitorder="little")
        return
    if missing := -len(stays) % 8:
        stays = torch.cat((stays, stays.new_zeros(missing)))
    bits.copy_((stays.view(torch.int64) * _GATHER) >> 56)


def _make_boolean_table(device: torch.device) -> Tensor:
    """Make a boolean table of shape [256, 8]: for each byte value its eight bits, the lowest first."""
    every = torch.arange(256, dtype=torch.uint8, device=device)
    bit = torch.arange(8, dtype=torch.uint8, device=device)
    return ((every[:, None] >> bit) & 1).view(torch.bool)


FROM_BITS: Final = Recipe(
    node=MASK,
    function=mask_of,
    operands=(),
    lists=frozenset(),
    optional=frozenset(),
    constants=("bits", "shape", "stride", "dtype", "number"),
    several=False,
)
