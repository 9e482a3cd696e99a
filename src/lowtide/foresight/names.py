"""Names for the blocks of a foreseen step, in the way in which a measured one gets them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lowtide import _torch
from lowtide.identity import tensors_in
from lowtide.rehearsal.timeline import _labels as labels
from lowtide.rehearsal.timeline import _Names

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from lowtide.remat.seam import Seam
    from lowtide.remat.values import Handle

__all__ = ["Names", "labels"]


class Names(_Names):
    """The probe of a measured step, told of storages by their numbers: fake ones are at no address."""

    def entering(self, seam: Seam, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begins("forward")
        if seam.module in self._repeated:
            self.blocks.add(self._calls)
        self.mark("enter", (self._calls, ()))
        self._open.append(self._calls)
        self._calls += 1

    def packed(self, handle: Handle, tensor: Tensor) -> None:
        assert self.engine.scope is not None
        self.modules.append(self.engine.scope.path)
        slot = self.packs
        self.packs += 1
        self._slots[handle] = slot
        self._deaths[slot] = weakref.ref(handle, lambda _: self.mark("release", slot))
        self.mark("pack", (slot, _torch.storage_id(tensor)))

    def _gradients(self) -> None:
        gradients = (p.grad for p in self.engine.model.parameters())
        self.mark("gradients", tuple(_torch.storage_id(g) for g in gradients if g is not None))

    def state(self, optimizers: Iterable[Optimizer]) -> None:
        """The step is over: which of the blocks are optimizer state."""
        found = [t for o in optimizers for entry in o.state.values() for t in tensors_in(entry)]
        self.mark("optimizer state", tuple(_torch.storage_id(t) for t in found))
