"""Find the moment at which the rehearsal becomes the only holder of memory that it keeps.

A trace keeps tensors that other plans recompute. Without the trace, the memory of such a tensor would be freed at the
moment when the rehearsal becomes its last holder: a loop variable has been rebound to the next result, or a list of
results has been freed with its function.
"""

from __future__ import annotations

import weakref
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

import torch

from lowtide._torch.distributed import get_own_part
from lowtide._torch.tensors import WeakStorage, get_storage_id
from lowtide.errors import RehearsalError
from lowtide.profiler.preconditions import NESTED

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.runtime.saved_values import Handle, Value


RECENT = 16
"""Number of the latest entries that each search checks, because loops mostly drop these first. On average a search
checks as many others.
"""


class _Memory:
    """Memory of one kept value, with the tensors through which the rehearsal refers to it."""

    __slots__ = ("looked", "storage", "tensors")

    def __init__(self, storage: WeakStorage, looked: int) -> None:
        self.storage = storage
        self.looked = looked
        """Number of the last search that found references from outside the rehearsal."""
        self.tensors: Counter[int] = Counter()
        """Number of the rehearsal's holders of each tensor in the memory, by the tensor's `id`."""

    @property
    def ours(self) -> int:
        """Number of tensors through which the rehearsal refers to the memory; a tensor with several holders counts
        once.
        """
        return len(self.tensors)


class ExternalReferences:
    """Memory of kept values that code outside the rehearsal holds, too.

    Checking all entries at every mark would be quadratic in the length of a step whose results stay in a list. So each
    search checks the last `RECENT` entries, the end of a call also checks the call's entries, and all entries are
    checked on `everything` or once (number of entries / `RECENT`) searches have passed. The work is linear in marks and
    entries.
    """

    def __init__(self) -> None:
        self._held: dict[int, _Memory] = {}
        """Entries by address of their memory, in order."""
        self._counted: dict[int, weakref.ref[Value | Handle]] = {}
        """Holders of the rehearsal's tensors, by `id`."""
        self._made: weakref.WeakSet[Value] = weakref.WeakSet()
        """Values to be recomputed, whose operands are watched."""
        self._looks = self._due = 0
        self.n_watched = 0
        """Number of entries so far, removed ones included."""

    def watch(self, handle: Handle) -> None:
        """Watch the memory of the value of `handle`; if the value is recomputed, watch the memory of its recompute's
        operands.
        """
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
        """Count the reference to `tensor` as one of the rehearsal while `holder` lives."""
        tensor = get_own_part(tensor)
        key = id(holder)
        if key in self._counted or not get_storage_id(tensor):
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

        def forget(_: object) -> None:
            memory.tensors[one] -= 1
            if not memory.tensors[one]:
                del memory.tensors[one]
            del self._counted[key]

        self._counted[key] = weakref.ref(holder, forget)

    def find_unreferenced(self, *, since: int | None = None, everything: bool = False) -> tuple[tuple[int, int], ...]:
        """Find memory that only the rehearsal's values still hold.

        Args:
            since: Check entries from this one on (`n_watched` at the time), in addition to the recent ones.
            everything: Check all entries.

        Returns:
            Address of each such memory, reported once, and the number of searches since references from outside the
            rehearsal were last found.
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
