"""Until when somebody else than the rehearsal holds memory of which the rehearsal keeps what was saved.

A trace keeps tensors that other plans recompute. When such a tensor's memory would go by itself is when the rehearsal
is the last that holds it: a loop's variable has taken the next result, a list of results has gone with its function.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING

import torch

from lowtide._torch.tensors import WeakStorage, storage_id
from lowtide.errors import RehearsalError
from lowtide.profiler.preconditions import NESTED

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.runtime.saved_values import Handle, Value


class _Memory:
    """What kept values are in, and which tensors of ours have it."""

    __slots__ = ("storage", "tensors")

    def __init__(self, storage: WeakStorage) -> None:
        self.storage = storage
        self.tensors: Counter[int] = Counter()
        """By `id`, how many of ours have it."""

    @property
    def ours(self) -> int:
        """How many there are: one that several of ours have is one owner of the memory."""
        return len(self.tensors)


class Holding:
    """The memory of kept values that somebody else holds, too."""

    def __init__(self) -> None:
        self._held: dict[int, _Memory] = {}
        """What is held, by the address of its memory."""
        self._counted: dict[int, weakref.ref[Value | Handle]] = {}
        """By `id`, who has a tensor of ours."""
        self._made: weakref.WeakSet[Value] = weakref.WeakSet()
        """What is to be made again, of which the operands are watched."""

    def watch(self, handle: Handle) -> None:
        """Watch the memory of what `handle` claims, and of what that is made of."""
        pending = [handle]
        while pending:
            handle = pending.pop()
            value = handle.value
            if value.leaf:
                continue
            if isinstance(handle.view, torch.Tensor):
                self._count(handle, handle.view)
            if value.maker is None:
                if value.tensor is not None:
                    self._count(value, value.tensor)
            elif value not in self._made:
                self._made.add(value)
                pending += [operand for operand in value.maker.operands if operand is not None]

    def _count(self, holder: Value | Handle, tensor: Tensor) -> None:
        """`holder` has `tensor` for as long as it lives."""
        key = id(holder)
        if key in self._counted or not storage_id(tensor):
            return
        if tensor.is_nested:
            raise RehearsalError(NESTED)
        storage = WeakStorage(tensor)
        memory = self._held.setdefault(storage.address, _Memory(storage))
        memory.tensors[one := id(tensor)] += 1

        def gone(_: object) -> None:
            memory.tensors[one] -= 1
            if not memory.tensors[one]:
                del memory.tensors[one]
            del self._counted[key]

        self._counted[key] = weakref.ref(holder, gone)

    def let_go(self) -> tuple[int, ...]:
        """Addresses of memory that has nobody left but our values, each once."""
        ended = [(address, owners) for address, it in self._held.items() if (owners := it.storage.owners()) <= it.ours]
        for address, _ in ended:
            del self._held[address]
        return tuple(address for address, owners in ended if owners)
