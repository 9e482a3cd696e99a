"""Known contents of fake tensors: real memory behind fake storages.

Contents belong to a storage; a tensor's contents are the same part of the real memory as the tensor is of the fake
storage, so views need no bookkeeping, and a write through one view is seen through all. Memory that comes from outside,
or that another storage shares, is copied before it is written to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lowtide._torch.fake_modes import is_strided

if TYPE_CHECKING:
    from torch import Tensor

_ATTRIBUTE = "_lowtide_contents"
"""Attribute of a fake storage's Python object, which lives as long as the storage."""

_CPU = torch.device("cpu")

LARGEST_COPIED = 2**26
"""Largest memory, in bytes, that is copied in order to be written to."""

senders: dict[str, None] = {}
"""Collectives by which other processes would have filled tensors in the current estimate; the keys are ordered."""


class _Contents:
    """Contents of one storage: its bytes, or one number repeated everywhere; and the assumption behind them."""

    __slots__ = ("alike", "assumed", "memory", "owned")

    def __init__(
        self, memory: torch.UntypedStorage | None, assumed: str, *, owned: bool = False, alike: Tensor | None = None
    ) -> None:
        self.memory, self.alike = memory, alike
        self.assumed = assumed
        self.owned = owned
        """True if no other tensor shares the memory, so that it may be written to."""


def is_met(tensor: Tensor) -> bool:
    """Return True if the contents of the tensor's storage were ever set, even if they are unknown by now."""
    return is_strided(tensor) and hasattr(tensor.untyped_storage(), _ATTRIBUTE)


def is_known(tensor: Tensor) -> bool:
    """Return True if the tensor's contents are known."""
    return _of(tensor) is not None


def value(tensor: Tensor) -> Tensor | None:
    """Return a fake tensor's contents in CPU memory, if known. The caller must not write to the returned tensor."""
    contents = _of(tensor)
    if contents is None:
        return None
    if contents.alike is not None:
        return contents.alike.expand(tensor.shape)
    assert contents.memory is not None
    piece = _piece(contents.memory, tensor)
    return piece if piece.device == _CPU else piece.to(_CPU)


def alike(tensor: Tensor, assumed: str) -> bool | None:
    """Return the one value that all elements of a boolean tensor have by the assumption `assumed`.

    Return None if the elements are not known to be equal, or not by that assumption.
    """
    contents = _of(tensor)
    if contents is None or contents.alike is None or contents.assumed != assumed:
        return None
    return bool(contents.alike)


def assumed(tensor: Tensor) -> str:
    """Return the assumption behind a tensor's contents, in words; empty if they are unknown or need no assumption."""
    contents = _of(tensor)
    return "" if contents is None else contents.assumed


def writable(tensor: Tensor, assumed: str = "") -> Tensor | None:
    """Return a fake tensor's contents for writing, and record the assumption `assumed`.

    Return None if the contents are unknown or too large to be copied.
    """
    contents = _of(tensor)
    if contents is None:
        return None
    size = tensor.untyped_storage().nbytes()
    if contents.memory is None or not contents.owned:
        if size > LARGEST_COPIED:
            return None
        contents.memory = _filled(size, contents.alike) if contents.memory is None else _copied(contents.memory)
        contents.alike, contents.owned = None, True
    contents.assumed = contents.assumed or assumed
    return _piece(contents.memory, tensor)


def borrow(fake: Tensor, real: Tensor) -> None:
    """Use the memory of `real`, without a copy, as the contents of `fake`; their storages must have the same size."""
    if is_strided(fake) and is_strided(real):
        _put(fake, _Contents(real.untyped_storage(), ""))


def learn(fake: Tensor, contents: Tensor, assumed: str = "") -> None:
    """Set the known contents of a fake tensor, which covers its storage, to those of the real tensor `contents`."""
    if not is_strided(fake) or _overlaps(fake):
        return
    memory, size = contents.untyped_storage(), fake.untyped_storage().nbytes()
    owned = contents.stride() != fake.stride() or contents.storage_offset() != 0 or memory.nbytes() != size
    if owned:
        memory = _allocate_bytes(size)
        _piece(memory, fake).copy_(contents)
    _put(fake, _Contents(memory, assumed, owned=owned))


def learn_alike(fake: Tensor, number: Tensor, assumed: str) -> None:
    """Set the known contents of a fake tensor to `number` in every element; no other tensor may share its storage."""
    if is_strided(fake):
        _put(fake, _Contents(None, assumed, alike=number))


def share(fake: Tensor, copy: Tensor) -> None:
    """Give `copy`, which has the same shape, the known contents of `fake`, if any."""
    contents = _of(fake)
    if contents is None:
        forget(copy)
    elif fake.untyped_storage().nbytes() == copy.untyped_storage().nbytes() and fake.stride() == copy.stride():
        contents.owned = False
        _put(copy, _Contents(contents.memory, contents.assumed, alike=contents.alike))
    elif fake.numel() * fake.element_size() <= LARGEST_COPIED:
        known = value(fake)
        assert known is not None
        learn(copy, known, contents.assumed)


def forget(fake: Tensor) -> None:
    """Mark the contents of this tensor's storage as unknown, after a write of unknown values."""
    if is_strided(fake):
        _put(fake, None)


def suppose(fake: Tensor, assumed: str) -> None:
    """Add an assumption to a tensor's known contents, unless they have one already."""
    if (contents := _of(fake)) is not None:
        contents.assumed = contents.assumed or assumed


def receive(fake: Tensor, sender: str) -> None:
    """Forget the contents of a tensor that other processes fill by the function `sender`."""
    forget(fake)
    senders[sender] = None


def _of(tensor: Tensor) -> _Contents | None:
    if not is_strided(tensor) or tensor.is_conj() or tensor.is_neg():
        return None
    storage = tensor.untyped_storage()
    contents: _Contents | None = getattr(storage, _ATTRIBUTE, None)
    if contents is None or (contents.memory is not None and contents.memory.nbytes() != storage.nbytes()):
        return None  # also after a resize
    return contents


def _put(tensor: Tensor, contents: _Contents | None) -> None:
    setattr(tensor.untyped_storage(), _ATTRIBUTE, contents)


def _allocate_bytes(size: int) -> torch.UntypedStorage:
    return torch.empty(size, dtype=torch.uint8).untyped_storage()


def _copied(memory: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a copy of `memory` on the CPU."""
    copy = _allocate_bytes(memory.nbytes())
    copy.copy_(memory)
    return copy


def _filled(size: int, number: Tensor | None) -> torch.UntypedStorage:
    """Return memory of `size` bytes with one number everywhere."""
    assert number is not None
    return number.expand(size // number.element_size()).contiguous().untyped_storage()


def _overlaps(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _piece(memory: torch.UntypedStorage, tensor: Tensor) -> Tensor:
    """Return the part of the real memory that corresponds to a fake tensor."""
    empty = torch.empty(0, dtype=tensor.dtype, device=memory.device)
    return empty.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
