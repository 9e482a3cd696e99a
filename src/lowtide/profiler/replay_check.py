"""Check that recomputed tensors have the same bits as the tensors that forward saved.

A replay in backward may read different values than the audit's replay right after the call: an object that the call
reads has been written to, or a context has ended. A checksum of each tensor is stored, not the tensor.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from lowtide._torch.backward import get_running_node_name
from lowtide._torch.fake_modes import is_fake
from lowtide._torch.nodes import is_workspace
from lowtide._torch.tensors import find_parts
from lowtide.errors import ReplayMismatch
from lowtide.memory.events import OWN_WORK
from lowtide.runtime import saved_values as values
from lowtide.runtime.replay import ReplayFrame
from lowtide.runtime.saved_values import Observer
from lowtide.state.bitwise import content_hash

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.runtime.engine import Engine
    from lowtide.runtime.saved_values import Handle, Value


class Witness:
    """Checksums of saved tensors, with which recomputed tensors are compared.

    Calls of `mark` enclose the allocations for checksums, so that they do not count in the recording.
    """

    def __init__(self, mark: Callable[[str, object], None]) -> None:
        self._mark = mark
        self._saved: dict[int, int] = {}
        self._is_working = False

    def saved(self, key: int, tensor: Tensor) -> None:
        """Store, under `key`, the checksum of a saved tensor that will be recomputed."""
        if not is_fake(tensor):
            self._saved[key] = self._sum(tensor)

    def differs(self, key: int, tensor: Tensor) -> bool:
        """Return True if the checksum stored for `key`, if any, differs from that of `tensor`, so that the bits surely
        differ.
        """
        known = self._saved.get(key)
        return known is not None and self._sum(tensor) != known

    def read(self, key: int, handle: Handle, tensor: Tensor) -> None:
        """Compare `tensor`, which backward reads, with the checksum for `key`. Raises ReplayMismatch if they differ.

        Nothing is raised if a second replay gives other bits than the first one. The block then contains a
        nondeterministic operator, such as one that adds numbers in any order, and its bits vary in plain steps too.
        """
        known = self._saved.get(key)
        if known is None or is_workspace(tensor, get_running_node_name()) or (checksum := self._sum(tensor)) == known:
            return
        maker = handle.value.maker
        if isinstance(maker, ReplayFrame):
            with self._own_work():
                if _checksum(_replay_once_more(maker, handle.value)) != checksum:
                    return
        frame = maker if isinstance(maker, ReplayFrame) else None
        source = "a tensor recomputed in a replayed block" if frame is None else str(frame.interceptor)
        raise ReplayMismatch(
            f"{source} gives other bits in backward than in forward: {list(tensor.shape)} {tensor.dtype}. It reads "
            "something that has changed in between, and this step ends before its update. Pass that as an argument, "
            "or store it in a buffer or an attribute.",
            None if frame is None else type(frame.interceptor.module),
        )

    def _sum(self, tensor: Tensor) -> int:
        with self._own_work():
            return _checksum(tensor)

    @contextlib.contextmanager
    def _own_work(self) -> Iterator[None]:
        """Leave allocations inside this `with` block out of the recording. Nested blocks are part of the outer one."""
        if self._is_working:  # a replay reads other recomputed tensors
            yield
            return
        self._is_working = True
        self._mark(OWN_WORK, True)
        try:
            yield
        finally:
            self._mark(OWN_WORK, False)
            self._is_working = False


class ReplayChecker(Observer):
    """Observer that compares the recomputed tensors that backward reads, under a plan, with those that forward saved.

    Checksums are compared. Raises ReplayMismatch at the first difference that no nondeterministic operator explains.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._witness = Witness(lambda label, data: None)  # counts in the recording, because the step is measured
        self._slots: weakref.WeakKeyDictionary[Handle, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self.creates_graph = False
        """True once backward has read a recomputed tensor in a pass that builds a graph itself."""

    @contextlib.contextmanager
    def running(self) -> Iterator[ReplayChecker]:
        """Record tensors saved inside this `with` block, and compare them with the tensors that backward reads in the
        block.
        """
        values.observer = self
        try:
            yield self
        finally:
            values.observer = None

    def has_packed(self, handle: Handle) -> bool:
        return handle in self._slots

    def on_pack(self, handle: Handle, tensor: Tensor) -> None:
        if not (handle.value.kept or handle.value.is_partial):
            self._slots[handle] = slot = next(self._numbers)
            self._witness.saved(slot, tensor)

    def on_unpack(self, handle: Handle, tensor: Tensor) -> None:
        self.creates_graph |= torch.is_grad_enabled()
        self._witness.read(self._slots[handle], handle, tensor)


def _checksum(tensor: Tensor) -> int:
    """Return a checksum of all parts of `tensor`; see `content_hash`."""
    with torch.no_grad():
        return hash(tuple(content_hash(part) for part in find_parts(tensor)))


def _replay_once_more(frame: ReplayFrame, value: Value) -> Tensor:
    """Replay the call of `frame` once more, and return the tensor of `value` from this replay."""
    tensors = frame.collect_saved()
    return next(tensor for place, tensor in tensors.items() if frame.values[place]() is value)
