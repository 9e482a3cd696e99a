"""Tensors that a frugal audit has freed: how they are recomputed, and the memory that trials may use because of it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lowtide.profiler.drafts import ValueDraft
from lowtide.runtime.recompute import Recompute

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.runtime.saved_values import Recomputation, Value


class FreedValues:
    """Values that a frugal audit frees in forward and recomputes in backward."""

    def __init__(self, index: Mapping[Value, int], saved: set[int], drafts: Sequence[ValueDraft]) -> None:
        """Begin without freed values. `index` maps values to positions in `drafts`; those in `saved` have slots."""
        self._index, self._saved, self._drafts = index, saved, drafts
        self._values: weakref.WeakSet[Value] = weakref.WeakSet()
        self._most: int | None = None
        """Bytes of all saved values when they were first counted."""

    def __contains__(self, value: Value) -> bool:
        return value in self._values

    def add(self, value: Value, maker: Recomputation | None) -> None:
        """Free a value, which `maker` recomputes; None if nothing needs it unless it is given back."""
        value.tensor, value.maker = None, maker
        self._values.add(value)

    def give_back(self, value: Value, tensor: Tensor) -> None:
        """Keep a value that was to be freed, because it is saved elsewhere or is an argument of a call."""
        self._values.discard(value)
        value.keep(tensor.detach())

    def free(self) -> None:
        """Free the values again that a trial in forward has recomputed."""
        for value in self._values:
            value.tensor = None

    def may_go(self, value: Value, maker: Recompute, *, chained: bool) -> bool:
        """Return True if the value can be freed: it has one reader, and backward reads the operands of `maker` anyway.

        An operand that backward does not read may be overwritten in between, unnoticed. If `chained`, an operand may be
        a freed value itself: in a block that will be run again, backward recomputes neither.
        """
        operands = [handle.value for handle in maker.operands if handle is not None]
        return (
            value.kept
            and value.readers >= 1
            and not maker.noted
            and all(
                (operand.kept and (operand.leaf or self._index.get(operand) in self._saved))
                or (chained and operand in self._values)
                for operand in operands
            )
        )

    def has_room_for(self, value: Value, maker: Recompute) -> bool:
        """Return True if a recompute in backward fits into the memory that the plain step's saved tensors take.

        The gradient that is about to be computed is as large as the value; the operands come on top.
        """
        needed = {value, *(handle.value for handle in maker.operands if handle is not None)}
        missing = [value for value in needed if value.tensor is None and value in self._index]
        more = sum(self._drafts[self._index[value]].bytes for value in missing)
        if not more:
            return True
        saved = [(value, n) for value, n in self._index.items() if n in self._saved]
        held = sum(self._drafts[n].bytes for value, n in saved if value.tensor is not None)
        if self._most is None:
            self._most = sum(self._drafts[n].bytes for _, n in saved)
        return more <= self._most - held
