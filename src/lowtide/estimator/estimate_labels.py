"""Labels for the memory blocks of an estimated step, like those of a measured step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lowtide._torch.tensors import get_storage_id
from lowtide.profiler.block_labels import LabelledTrace, labels
from lowtide.profiler.trace_marks import OptimizerState, Packed, Released
from lowtide.runtime.live_optimizers import list_optimizer_state

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from lowtide.runtime.saved_values import Handle

__all__ = ["EstimateTrace", "labels"]


class EstimateTrace(LabelledTrace):
    """Trace of a step on fake tensors. Their storages are identified by number, because they have no address."""

    def _address(self, tensor: Tensor) -> int:
        return get_storage_id(tensor)

    def on_pack(self, handle: Handle, tensor: Tensor) -> None:
        scope = self.engine.here.scope
        assert scope is not None
        self.modules.append(scope.path)
        slot = self.packs
        self.packs += 1
        self._slots[handle] = slot
        self._deaths[slot] = weakref.ref(handle, lambda _: self.mark(Released(slot)))
        self.mark(Packed(slot, self._address(tensor)))

    def state(self, optimizers: Iterable[Optimizer]) -> None:
        """Record the memory blocks of optimizer state after the step."""
        self.mark(OptimizerState(tuple(map(self._address, list_optimizer_state(optimizers)))))
