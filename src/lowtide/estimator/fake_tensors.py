"""Fake counterparts of real tensors, with the same shapes and strides and the same sharing of memory."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lowtide._torch.fake_modes import is_fake, is_strided, make_parameter, without_modes
from lowtide._torch.tensors import exchange, find_parts, get_storage_number
from lowtide.errors import RehearsalError
from lowtide.estimator import sparse_tensors as sparse
from lowtide.profiler.preconditions import NESTED

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide._torch.fake_modes import FakeTensorMode


class FakeTensors:
    """Fake counterparts of the real tensors that a rehearsed step uses, with the same sharing of memory.

    No real tensor is ever written to, because operators get only the counterparts. A counterpart is on its tensor's
    device, or on `device` if that is given.
    """

    def __init__(self, mode: FakeTensorMode, device: str | None = None) -> None:
        self._mode, self._device = mode, device
        self._fake_tensors: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._memory: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        """Number of a real storage -> the storage, held so that its number is not reused, and its fake bytes."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return the fake counterpart of a real tensor. It is created at the first call."""
        fake: Tensor | None = self._fake_tensors.get(tensor)  # type: ignore[no-untyped-call]
        if fake is None or fake.shape != tensor.shape:
            fake = self._fake_tensors[tensor] = self._make(tensor)
        return fake

    def of_new(self, tensor: Tensor) -> Tensor:
        """Return a fake counterpart of a new real tensor, without keeping a reference to either."""
        fake = self.of(tensor)
        self._fake_tensors.pop(tensor)  # type: ignore[no-untyped-call]
        self.release(tensor)
        return fake

    def separate(self, tensor: Tensor) -> Tensor:
        """Return a fake counterpart with memory of its own for the tensor's elements, like a copy on another device."""
        with without_modes(), self._mode:
            geometry = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
            return torch.empty_like(geometry, device=self._choose_device(tensor))

    def release(self, tensor: Tensor) -> None:
        """Drop the reference to the fake memory of a real tensor's storage."""
        if is_strided(tensor):
            self._memory.pop(get_storage_number(tensor.untyped_storage()), None)

    def _choose_device(self, tensor: Tensor) -> torch.device | str:
        return self._device or tensor.device

    def _make(self, tensor: Tensor) -> Tensor:
        if sparse.is_sparse(tensor):  # torch's fake tensor of this layout has no elements
            with without_modes(), torch.no_grad():
                indices, values = map(self.of, find_parts(tensor.detach()))
                with self._mode:
                    return sparse.like(tensor, indices, values).requires_grad_(tensor.requires_grad)
        if tensor.is_nested:
            raise RehearsalError(NESTED)
        if not is_strided(tensor):
            fake: Tensor = self._mode.from_tensor(tensor)
            return fake
        storage, size = tensor.untyped_storage(), tensor.element_size()
        number = get_storage_number(storage)
        with without_modes(), torch.no_grad(), self._mode:
            entry = self._memory.get(number)
            if entry is None:
                memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device=self._choose_device(tensor))
                self._memory[number] = storage, memory
            else:
                memory = entry[1]
            whole = memory[: memory.numel() // size * size].view(tensor.dtype)
            view = whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        return view


def is_real(obj: Any) -> bool:
    """Return True for a tensor that is not fake."""
    return isinstance(obj, torch.Tensor) and not is_fake(obj)


@contextlib.contextmanager
def placed(tensors: Iterable[Tensor], device: str, mode: FakeTensorMode) -> Iterator[None]:
    """Turn meta tensors into fake tensors on `device` in this block. The Python objects stay the same.

    Raises RehearsalError for tensors whose contents torch can't exchange.
    """
    done: list[tuple[Tensor, Tensor]] = []
    try:
        for tensor in {id(t): t for t in tensors if t.device.type == "meta"}.values():
            with mode, torch.no_grad():
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, torch.nn.Parameter):
                make_parameter(fake, tensor.requires_grad)
            swap(tensor, fake)
            done.append((tensor, fake))
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # frames of a failed step hold graphs, which hold parameters
        raise
    finally:
        for tensor, fake in done:
            tensor.grad = None
            swap(tensor, fake)


def swap(tensor: Tensor, fake: Tensor) -> None:
    """Exchange the contents of two tensors, but not their Python objects. Raises RehearsalError if torch refuses."""
    try:
        exchange(tensor, fake)
    except (RuntimeError, TypeError) as error:
        raise RehearsalError(
            f"a {type(tensor).__name__} of shape {list(tensor.shape)} on the meta device can't be estimated: {error}.\n"
            "  Make the model on a real device; an estimate takes no memory beyond its parameters."
        ) from error
