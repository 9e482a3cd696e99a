"""Recomputes that an audit times again in backward, where a plan will run them.

In forward the operands were just computed and are in processor caches; in backward they come from memory. The first
run of an op may also pay for its library's setup. And cuDNN's trial of algorithms (`torch.backends.cudnn.benchmark`) is
per thread, and backward on a GPU runs in its own thread.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from lowtide.runtime.recompute import Recompute

if TYPE_CHECKING:
    from lowtide.profiler.audited_step import AuditedStep
    from lowtide.profiler.measure_call import Meter
    from lowtide.runtime.saved_values import Value


class BackwardTimings:
    """Recomputes of the values that one forward pass saves, to be timed in backward."""

    def __init__(self, step: AuditedStep, meter: Meter) -> None:
        """Start without recomputes. The times that `meter` measures in backward are written into drafts of `step`."""
        self._step, self._meter = step, meter
        self._recomputes: weakref.WeakKeyDictionary[Value, Recompute] = weakref.WeakKeyDictionary()
        """Recomputes that have not run in backward yet. Each is dropped with its value, because the graph may be freed
        without a backward.
        """
        self._indices: weakref.WeakKeyDictionary[Recompute, int] = weakref.WeakKeyDictionary()
        """Index of the value that each recompute computes, also for intermediate values."""

    def add(self, value: Value, maker: Recompute, index: int) -> None:
        """Time `maker`, which computes the value at `index`, when backward is about to read the value."""
        self._recomputes[value] = maker
        self._indices[maker] = index

    def add_intermediate(self, maker: Recompute, index: int) -> None:
        """Time `maker`, which computes an intermediate of other recomputes, whenever it runs in backward."""
        self._indices[maker] = index

    def get_recompute(self, value: Value) -> Recompute | None:
        """Return the recompute of a value that backward has not read yet; None if the value has none."""
        return self._recomputes.get(value)

    def take(self, value: Value) -> Recompute | None:
        """Remove and return the recompute of a value that backward reads for the first time; None if it has none."""
        return self._recomputes.pop(value, None)

    def drop_unread(self) -> None:
        """Drop the recomputes of values that no slot has saved, so that their operands are freed."""
        for value in list(self._recomputes):
            if not self._step.is_saved(value):
                del self._recomputes[value]

    def record(self, maker: Recompute) -> None:
        """Record the time of a recompute that has run in backward."""
        if maker in self._indices:
            draft, spent = self._step.values[self._indices[maker]], self._meter.of(maker)
            draft.cost_ms, draft.host_ms = spent.cost_ms, spent.host_ms

    def clear(self) -> None:
        """Drop all recomputes that have not run in backward."""
        self._recomputes.clear()
