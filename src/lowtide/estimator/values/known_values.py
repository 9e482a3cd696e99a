"""The contents of fake tensors, where they are known: real memory behind fake storages.

A storage has contents or has none; a tensor's contents are the same piece of the real memory that the tensor is of the
fake one, so that views need nothing of their own, and what is written through one view is seen through all. Memory that
came from outside, or that another storage has too, is copied before anything is written to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lowtide._torch.fake_modes import is_strided

if TYPE_CHECKING:
    from torch import Tensor

_ATTRIBUTE = "_lowtide_contents"
"""Of a fake storage's Python object, which lives as long as the storage."""

_CPU = torch.device("cpu")

LARGEST_COPIED = 2**26
"""Bytes of memory up to which it is copied to be written to."""


class _Contents:
    """Of one storage: its bytes, or the one number that is everywhere in it; and what they assume."""

    __slots__ = ("alike", "assumed", "memory", "owned")

    def __init__(
        self, memory: torch.UntypedStorage | None, assumed: str, *, owned: bool = False, alike: Tensor | None = None
    ) -> None:
        self.memory, self.alike = memory, alike
        self.assumed = assumed
        self.owned = owned
        """Whether nobody else has the memory."""


def is_met(tensor: Tensor) -> bool:
    """Whether anything was ever said of the storage's contents, if only that nobody knows them any longer."""
    return is_strided(tensor) and hasattr(tensor.untyped_storage(), _ATTRIBUTE)


def is_known(tensor: Tensor) -> bool:
    """Whether `value` would give something."""
    return _of(tensor) is not None


def value(tensor: Tensor) -> Tensor | None:
    """The contents of a fake tensor in the CPU's memory, if they are known. Not to be written to."""
    contents = _of(tensor)
    if contents is None:
        return None
    if contents.alike is not None:
        return contents.alike.expand(tensor.shape)
    assert contents.memory is not None
    piece = _piece(contents.memory, tensor)
    return piece if piece.device == _CPU else piece.to(_CPU)


def alike(tensor: Tensor, assumed: str) -> bool | None:
    """What is everywhere in a tensor of booleans, if that was assumed; None otherwise."""
    contents = _of(tensor)
    if contents is None or contents.alike is None or contents.assumed != assumed:
        return None
    return bool(contents.alike)


def assumed(tensor: Tensor) -> str:
    """What the contents assume, in words; nothing if they are not known or need no assumption."""
    contents = _of(tensor)
    return "" if contents is None else contents.assumed


def writable(tensor: Tensor, assumed: str = "") -> Tensor | None:
    """The contents of a fake tensor, to be written to with what assumes that; None if they can't be."""
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
    """A fake tensor's storage has the contents of the real one's, which is of the same size."""
    if is_strided(fake) and is_strided(real):
        _put(fake, _Contents(real.untyped_storage(), ""))


def learn(fake: Tensor, contents: Tensor, assumed: str = "") -> None:
    """A fake tensor that covers its storage has these contents."""
    if not is_strided(fake) or _overlaps(fake):
        return
    memory, size = contents.untyped_storage(), fake.untyped_storage().nbytes()
    owned = contents.stride() != fake.stride() or contents.storage_offset() != 0 or memory.nbytes() != size
    if owned:
        memory = _of_size(size)
        _piece(memory, fake).copy_(contents)
    _put(fake, _Contents(memory, assumed, owned=owned))


def learn_alike(fake: Tensor, number: Tensor, assumed: str) -> None:
    """A fake tensor has a storage of its own, with this number everywhere."""
    if is_strided(fake):
        _put(fake, _Contents(None, assumed, alike=number))


def share(fake: Tensor, copy: Tensor) -> None:
    """A copy, of the same shape, has the contents of its tensor: none if that has none."""
    contents = _of(fake)
    if contents is None:
        forget(copy)
    elif fake.untyped_storage().nbytes() == copy.untyped_storage().nbytes() and fake.stride() == copy.stride():
        contents.owned = False
        _put(copy, _Contents(contents.memory, contents.assumed, alike=contents.alike))
    elif fake.numel() * fake.element_size() <= LARGEST_COPIED:
        found = value(fake)
        assert found is not None
        learn(copy, found, contents.assumed)


def forget(fake: Tensor) -> None:
    """Something was written to this tensor's storage that nobody knows."""
    if is_strided(fake):
        _put(fake, None)


def _of(tensor: Tensor) -> _Contents | None:
    if not is_strided(tensor) or tensor.is_conj() or tensor.is_neg():
        return None
    storage = tensor.untyped_storage()
    contents: _Contents | None = getattr(storage, _ATTRIBUTE, None)
    if contents is None or (contents.memory is not None and contents.memory.nbytes() != storage.nbytes()):
        return None  # or it was resized
    return contents


def _put(tensor: Tensor, contents: _Contents | None) -> None:
    setattr(tensor.untyped_storage(), _ATTRIBUTE, contents)


def _of_size(size: int) -> torch.UntypedStorage:
    return torch.empty(size, dtype=torch.uint8).untyped_storage()


def _copied(memory: torch.UntypedStorage) -> torch.UntypedStorage:
    """The same bytes in memory of the CPU that nobody else has."""
    copy = _of_size(memory.nbytes())
    copy.copy_(memory)
    return copy


def _filled(size: int, number: Tensor | None) -> torch.UntypedStorage:
    """Memory of so many bytes with one number everywhere."""
    assert number is not None
    return number.expand(size // number.element_size()).contiguous().untyped_storage()


def _overlaps(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _piece(memory: torch.UntypedStorage, tensor: Tensor) -> Tensor:
    """The piece of real memory that a fake tensor is of its storage."""
    empty = torch.empty(0, dtype=tensor.dtype, device=memory.device)
    return empty.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
