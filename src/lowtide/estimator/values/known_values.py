"""Known contents of fake tensors: real memory that is attached to fake storages.

Contents belong to a storage. A tensor's contents are the part of the real memory at the tensor's offset and strides, so
views need no bookkeeping, and a write through one view is seen by all. Memory of real tensors, or memory that several
storages share, is copied before it is written to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lowtide._torch.fake_modes import is_strided

if TYPE_CHECKING:
    from torch import Tensor

_ATTRIBUTE = "_lowtide_contents"
"""Attribute of a fake storage's Python object that holds the contents. The object lives as long as the storage."""

_CPU = torch.device("cpu")

LARGEST_COPIED = 2**26
"""Size in bytes of the largest memory that is copied before a write. Contents of larger memory become unknown."""

senders: dict[str, None] = {}
"""Names of collectives by which other processes would have filled tensors in the current estimate, in order."""


class _Contents:
    """Contents of one storage: its bytes, or one number for all elements; and the assumption on which they depend."""

    __slots__ = ("alike", "assumed", "memory", "owned")

    def __init__(
        self, memory: torch.UntypedStorage | None, assumed: str, *, owned: bool = False, alike: Tensor | None = None
    ) -> None:
        self.memory, self.alike = memory, alike
        self.assumed = assumed
        self.owned = owned
        """True if no other tensor shares the memory, so that it may be written to."""


def is_met(tensor: Tensor) -> bool:
    """Return True if the contents of the tensor's storage were set before, even if they are unknown by now."""
    return is_strided(tensor) and hasattr(tensor.untyped_storage(), _ATTRIBUTE)


def is_known(tensor: Tensor) -> bool:
    """Return True if the tensor's contents are known."""
    return _read_contents(tensor) is not None


def value(tensor: Tensor) -> Tensor | None:
    """Return a fake tensor's contents in CPU memory, if known. The caller must not write to the returned tensor."""
    contents = _read_contents(tensor)
    if contents is None:
        return None
    if contents.alike is not None:
        return contents.alike.expand(tensor.shape)
    assert contents.memory is not None
    piece = _view_like(contents.memory, tensor)
    return piece if piece.device == _CPU else piece.to(_CPU)


def alike(tensor: Tensor, assumed: str) -> bool | None:
    """Return the value of all elements of a boolean tensor if it follows from the assumption `assumed`.

    Return None if the elements are not known to be equal, or if they do not depend on that assumption.
    """
    contents = _read_contents(tensor)
    if contents is None or contents.alike is None or contents.assumed != assumed:
        return None
    return bool(contents.alike)


def assumed(tensor: Tensor) -> str:
    """Return the assumption on which a tensor's contents depend; "" if they are unknown or depend on none."""
    contents = _read_contents(tensor)
    return "" if contents is None else contents.assumed


def writable(tensor: Tensor, assumed: str = "") -> Tensor | None:
    """Return a fake tensor's contents for writing, and record that they depend on the assumption `assumed`.

    Return None if the contents are unknown or too large to copy.
    """
    contents = _read_contents(tensor)
    if contents is None:
        return None
    size = tensor.untyped_storage().nbytes()
    if contents.memory is None or not contents.owned:
        if size > LARGEST_COPIED:
            return None
        contents.memory = _fill(size, contents.alike) if contents.memory is None else _copy_to_cpu(contents.memory)
        contents.alike, contents.owned = None, True
    contents.assumed = contents.assumed or assumed
    return _view_like(contents.memory, tensor)


def borrow(fake: Tensor, real: Tensor) -> None:
    """Use the memory of `real`, without a copy, as the contents of `fake`. Their storages must have the same size."""
    if is_strided(fake) and is_strided(real):
        _set_contents(fake, _Contents(real.untyped_storage(), ""))


def learn(fake: Tensor, contents: Tensor, assumed: str = "") -> None:
    """Set the contents of a fake tensor, which must cover its storage, to those of the real tensor `contents`."""
    if not is_strided(fake) or _overlaps(fake):
        return
    memory, size = contents.untyped_storage(), fake.untyped_storage().nbytes()
    owned = contents.stride() != fake.stride() or contents.storage_offset() != 0 or memory.nbytes() != size
    if owned:
        memory = _allocate_bytes(size)
        _view_like(memory, fake).copy_(contents)
    _set_contents(fake, _Contents(memory, assumed, owned=owned))


def learn_alike(fake: Tensor, number: Tensor, assumed: str) -> None:
    """Set all elements of a fake tensor to `number`. No other tensor may share its storage."""
    if is_strided(fake):
        _set_contents(fake, _Contents(None, assumed, alike=number))


def share(fake: Tensor, copy: Tensor) -> None:
    """Set the contents of `copy`, which has the same shape, to those of `fake`, or to unknown."""
    contents = _read_contents(fake)
    if contents is None:
        forget(copy)
    elif fake.untyped_storage().nbytes() == copy.untyped_storage().nbytes() and fake.stride() == copy.stride():
        contents.owned = False
        _set_contents(copy, _Contents(contents.memory, contents.assumed, alike=contents.alike))
    elif fake.numel() * fake.element_size() <= LARGEST_COPIED:
        known = value(fake)
        assert known is not None
        learn(copy, known, contents.assumed)


def forget(fake: Tensor) -> None:
    """Mark the contents of this tensor's storage as unknown, as after a write of unknown values."""
    if is_strided(fake):
        _set_contents(fake, None)


def suppose(fake: Tensor, assumed: str) -> None:
    """Record that a tensor's known contents depend on the assumption `assumed`, unless they depend on one already."""
    if (contents := _read_contents(fake)) is not None:
        contents.assumed = contents.assumed or assumed


def receive(fake: Tensor, sender: str) -> None:
    """Forget the contents of a tensor that other processes fill by the function `sender`."""
    forget(fake)
    senders[sender] = None


def _read_contents(tensor: Tensor) -> _Contents | None:
    if not is_strided(tensor) or tensor.is_conj() or tensor.is_neg():
        return None
    storage = tensor.untyped_storage()
    contents: _Contents | None = getattr(storage, _ATTRIBUTE, None)
    if contents is None or (contents.memory is not None and contents.memory.nbytes() != storage.nbytes()):
        return None  # also after a resize
    return contents


def _set_contents(tensor: Tensor, contents: _Contents | None) -> None:
    setattr(tensor.untyped_storage(), _ATTRIBUTE, contents)


def _allocate_bytes(size: int) -> torch.UntypedStorage:
    return torch.empty(size, dtype=torch.uint8).untyped_storage()


def _copy_to_cpu(memory: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a copy of `memory` on the CPU."""
    copy = _allocate_bytes(memory.nbytes())
    copy.copy_(memory)
    return copy


def _fill(size: int, number: Tensor | None) -> torch.UntypedStorage:
    """Return a storage of `size` bytes whose elements all are `number`."""
    assert number is not None
    return number.expand(size // number.element_size()).contiguous().untyped_storage()


def _overlaps(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _view_like(memory: torch.UntypedStorage, tensor: Tensor) -> Tensor:
    """Return a tensor over the real `memory` with the offset, shape and strides of a fake tensor."""
    empty = torch.empty(0, dtype=tensor.dtype, device=memory.device)
    return empty.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
