"""Masks, kept with one bit for each element.

A mask says which elements stay. Dropout on a CPU, and attention where it has no fused kernel, multiply by a tensor of
zeros and of one number, 1 / (1 - p), that no autograd node made. Dropout on a GPU, `where` and `masked_fill` save
booleans, a byte each. A bit says as much: that is a 32nd of a mask in single precision, an 8th of a boolean one.

Nothing is guessed: every element is looked at in every step, and what has a third value is kept as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lowtide._torch.fake_modes import is_fake
from lowtide._torch.tensors import base_of, is_plain
from lowtide.planner.address_nodes import MASK
from lowtide.runtime.recipes import CannotRecompute, Recipe, TooSmall

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

LEAST_BYTES = 4096
"""Smaller masks are kept."""

AT_ONCE = 2**17
"""Elements, a multiple of 8, so few that a CPU finds them in its cache again."""
MANY_AT_ONCE = 2**23
"""The same for a GPU, so few that what lies in between needs little memory."""

_INTEGERS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the size of an element: numbers are compared by their bits, so that -0.0 is not 0.0."""

_GATHER: Final = 0x0102040810204080
"""A word of eight bytes that are 0 or 1, times this, has them as the bits of its highest byte, the first the lowest."""


def bits_of(mask: Tensor) -> dict[str, Any]:
    """What `FROM_BITS` makes `mask` of. Raises CannotRecompute, saying why it is none."""
    if not may_be_a_mask(mask):
        raise CannotRecompute("it is not of a kind that masks are of")
    bits = room_for_bits(mask)
    number = 1 if is_fake(mask) else fill(bits, mask)
    return {"bits": bits, "shape": mask.shape, "stride": mask.stride(), "dtype": mask.dtype, "number": number}


def signs_of(tensor: Tensor) -> dict[str, Any]:
    """What `FROM_BITS` makes a tensor of that is 1 where `tensor` is above 0 or not a number, and 0 elsewhere.

    Raises CannotRecompute, saying why that can't be.
    """
    if not is_whole(tensor):
        raise CannotRecompute("its elements are not all that its memory has")
    bits = room_for_bits(tensor)
    if not is_fake(tensor):
        flat = tensor.detach().as_strided((tensor.numel(),), (1,))
        for elements, eighths in _parts(flat):
            _gather(_is_positive(flat[elements]), bits[eighths])
    return {"bits": bits, "shape": tensor.shape, "stride": tensor.stride(), "dtype": tensor.dtype, "number": None}


def _is_positive(flat: Tensor) -> Tensor:
    """Where `flat` is above 0 or not a number."""
    if flat.device.type != "cpu" or flat.dtype is torch.bfloat16:
        return (flat <= 0).logical_not_()
    is_not = _read(flat) <= 0  # numpy's own memory, an eighth of a MiB at most
    return torch.from_numpy(np.logical_not(is_not, out=is_not))


def room_for_bits(tensor: Tensor) -> Tensor:
    """Memory for a bit of each element. Raises TooSmall if that is not worth it."""
    if tensor.nbytes < LEAST_BYTES:
        raise TooSmall("too small to gain anything")
    return torch.empty(-(-tensor.numel() // 8), dtype=torch.uint8, device=tensor.device)


def may_be_a_mask(tensor: Tensor) -> bool:
    """What can be said without looking at the elements."""
    numbers = tensor.is_floating_point() and tensor.element_size() in _INTEGERS and tensor.device.type == "cpu"
    return not tensor.requires_grad and (numbers or tensor.dtype is torch.bool) and is_whole(tensor)


def is_whole(tensor: Tensor) -> bool:
    """Whether a tensor's elements are all that is in its memory."""
    return is_plain(tensor) and base_of(tensor) is None and tensor.nbytes == tensor.untyped_storage().nbytes()


def fill(bits: Tensor, mask: Tensor) -> int:
    """Write which elements of `mask` are not zero; gives what these are, as an integer of the same bits.

    Raises CannotRecompute if they are not all the same.
    """
    flat, number = mask.as_strided((mask.numel(),), (1,)), 0
    if mask.dtype is torch.bool:
        for elements, eighths in _parts(flat):
            _gather(flat[elements], bits[eighths])
        return 1
    numbers, into = _read(flat.view(_INTEGERS[mask.element_size()])), bits.numpy()
    for elements, eighths in _parts(flat):
        part = numbers[elements]
        number = number or _first_number(part[:64]) or _first_number(part)
        stays = part == number if number else part != 0  # nothing but zeros so far
        if np.count_nonzero(stays) != np.count_nonzero(part):
            raise CannotRecompute("it has more than two values")
        into[eighths] = np.packbits(stays, bitorder="little")
    if not number:
        raise CannotRecompute("it is all zeros")
    return number


def _read(tensor: Tensor) -> NDArray[Any]:
    """The memory of a tensor on a CPU, to be read.

    Not by `Tensor.numpy`: what that was called on, here a tensor of the model's, can't be resized any more (torch
    2.13), and a recording takes it for memory of somebody else.
    """
    return np.from_dlpack(tensor)


def _first_number(part: NDArray[Any]) -> int:
    """The first that is not 0, if there is one."""
    return int(part[(part != 0).argmax()])


def mask_of(
    *, bits: Tensor, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, number: int | None
) -> Tensor:
    """The mask that `fill` was given; ones and zeros without a `number`."""
    mask = torch.empty_strided(shape, stride, dtype=dtype, device=bits.device)
    if is_fake(bits):
        return mask
    flat = mask.as_strided((mask.numel(),), (1,))
    if bits.device.type == "cpu":
        _look_up(bits, flat, number)
        return mask
    table = _booleans(bits.device).view(torch.int64).view(-1)
    for elements, eighths in _parts(flat):
        part = flat[elements]
        part.copy_(table.take(bits[eighths].long()).view(torch.bool)[: len(part)])
    return mask


def _look_up(bits: Tensor, flat: Tensor, number: int | None) -> None:
    """Fill `flat`: for each byte of `bits` eight elements at once, which a table has."""
    if number is None or flat.dtype is torch.bool:
        number = int.from_bytes(torch.ones(1, dtype=flat.dtype).view(torch.uint8).numpy().tobytes(), "little")
    size, whole = flat.element_size(), flat.numel() // 8
    table, memory = _elements(size, number), flat.view(torch.uint8).numpy()
    rows = memory[: 8 * size * whole].reshape(whole, 8 * size)
    # Without "clip" numpy would fill another array of that size first. No index is out of bounds.
    np.take(table, bits[:whole].numpy(), axis=0, out=rows, mode="clip")
    if rest := len(memory) - rows.size:
        memory[-rest:] = table[int(bits[-1])][:rest]


@lru_cache(maxsize=64)
def _elements(size: int, number: int) -> NDArray[np.uint8]:
    """[256, 8 * size]: for each byte what its bits stand for, which is `number` or 0 in `size` bytes, as bytes."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    elements: NDArray[np.uint8] = (bits.astype(f"i{size}") * np.array(number, dtype=f"i{size}")).view(np.uint8)
    return elements


def _parts(flat: Tensor) -> Iterator[tuple[slice, slice]]:
    """The elements of a mask, some at once, and where their bits are, eight in each place."""
    at_once = AT_ONCE if flat.device.type == "cpu" else MANY_AT_ONCE
    for first in range(0, len(flat), at_once):
        last = min(first + at_once, len(flat))
        yield slice(first, last), slice(first // 8, -(-last // 8))


def _gather(stays: Tensor, bits: Tensor) -> None:
    """Eight booleans into each byte, the first one into its lowest bit."""
    if stays.device.type == "cpu":
        bits.numpy()[:] = np.packbits(_read(stays), bitorder="little")
        return
    if missing := -len(stays) % 8:
        stays = torch.cat((stays, stays.new_zeros(missing)))
    bits.copy_((stays.view(torch.int64) * _GATHER) >> 56)


def _booleans(device: torch.device) -> Tensor:
    """[256, 8]: for each byte its bits."""
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
