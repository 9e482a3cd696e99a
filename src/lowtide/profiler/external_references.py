"""Until when somebody else than the rehearsal holds memory of which the rehearsal keeps what was saved.

A trace keeps tensors that other plans recompute. When such a tensor's memory would go by itself is when the rehearsal
is the last that holds it: a loop's variable has taken the next result, a list of results has gone with its function.
"""

from __future__ import annotations

import weakref
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

import torch

from lowtide._torch.tensors import WeakStorage, storage_id
from lowtide.errors import RehearsalError
from lowtide.profiler.preconditions import NESTED

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.runtime.saved_values import Handle, Value


RECENT = 16
"""Entries that every look goes through: the last ones, which loops mostly drop first, and as many of the others."""


class _Memory:
    """Memory of kept values, and the rehearsal's tensors that have it."""

    __slots__ = ("looked", "storage", "tensors")

    def __init__(self, storage: WeakStorage, looked: int) -> None:
        self.storage = storage
        self.looked = looked
        """Number of the last look that found it held by others."""
        self.tensors: Counter[int] = Counter()
        """By `id`, how many of ours have it."""

    @property
    def ours(self) -> int:
        """How many there are: one that several of ours have is one owner of the memory."""
        return len(self.tensors)


class ExternalReferences:
    """The memory of kept values that others hold, too.

    A look at all entries at every mark would be quadratic in the length of a step whose results stay in a list. So the
    last `RECENT` entries are looked at each time, those of a call where it ends, and all where `everything` is asked
    for or as many looks have passed as there are entries / `RECENT`. The work is linear in marks and entries.
    """

    def __init__(self) -> None:
        self._held: dict[int, _Memory] = {}
        """Entries by the address of their memory, in order."""
        self._counted: dict[int, weakref.ref[Value | Handle]] = {}
        """By `id`, holders of the rehearsal's tensors."""
        self._made: weakref.WeakSet[Value] = weakref.WeakSet()
        """What is to be made again, of which the operands are watched."""
        self._looks = self._due = 0
        self.n_watched = 0
        """Entries that there have been."""

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
        memory = self._held.get(storage.address)
        if memory is None or not memory.ours:
            self._held.pop(storage.address, None)
            memory = self._held[storage.address] = _Memory(storage, self._looks)
            self.n_watched += 1
        memory.tensors[one := id(tensor)] += 1

        def gone(_: object) -> None:
            memory.tensors[one] -= 1
            if not memory.tensors[one]:
                del memory.tensors[one]
            del self._counted[key]

        self._counted[key] = weakref.ref(holder, gone)

    def let_go(self, *, since: int | None = None, everything: bool = False) -> tuple[tuple[int, int], ...]:
        """Look for memory that has only the rehearsal's values left.

        Args:
            since: Look at entries from this one on (`n_watched` at the time), beside the recent ones.
            everything: Look at all entries.

        Returns:
            For each such memory, once: its address and how many looks ago it was last seen held by others.
        """
        self._looks += 1
        self._due += RECENT
        n = max(RECENT, 0 if since is None else self.n_watched - since)
        if everything or self._due >= len(self._held):
            n, self._due = len(self._held), 0
        ended = []
        for memory in tuple(islice(reversed(self._held.values()), n)):
            address, owners, ours = memory.storage.address, memory.storage.owners(), memory.ours
            if owners > ours > 0:
                memory.looked = self._looks
            elif self._held.pop(address, None) and owners and ours:
                ended.append((address, self._looks - memory.looked))
        return tuple(ended)
