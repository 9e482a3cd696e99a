"""Until when somebody else than the rehearsal holds memory of which the rehearsal keeps what was saved.

A trace keeps tensors that other plans remake. When such a tensor's memory would go by itself is when the rehearsal is
the last that holds it: a loop's variable has taken the next result, a list of results has gone with its function.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from lowtide._torch import WeakStorage, storage_id

if TYPE_CHECKING:
    from lowtide.remat.values import Handle, Value


class Holding:
    """The memory of kept values that somebody else holds, too."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[WeakStorage, weakref.WeakSet[Value]]] = {}
        """By the address: the memory, and our values in it."""
        self._made: weakref.WeakSet[Value] = weakref.WeakSet()
        """What is to be made again, of which the operands are watched."""

    def watch(self, handle: Handle) -> None:
        """Watch the memory of what `handle` claims, and of what that is made of."""
        pending = [handle.value]
        while pending:
            value = pending.pop()
            if value.maker is None:
                self._watch(value)
            elif value not in self._made:
                self._made.add(value)
                pending += [operand.value for operand in value.maker.operands if operand is not None]

    def _watch(self, value: Value) -> None:
        if value.tensor is not None and not value.leaf and storage_id(value.tensor):
            storage = WeakStorage(value.tensor)
            self._held.setdefault(storage.address, (storage, weakref.WeakSet()))[1].add(value)

    def let_go(self) -> tuple[int, ...]:
        """Addresses of memory that has nobody left but our values, each once."""
        found = []
        for address, (storage, ours) in list(self._held.items()):
            owners = storage.owners()
            if owners <= sum(value.tensor is not None for value in ours):
                del self._held[address]
                if owners:
                    found.append(address)
        return tuple(found)
