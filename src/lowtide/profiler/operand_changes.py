"""Operands that the recomputes of an audit read, and a search for recomputes that an overwritten operand rules out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lowtide._torch.tensors import get_storage_id
from lowtide.profiler.unrecorded_operands import Unrecorded
from lowtide.runtime.recompute import Recompute

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.runtime.operand_capture import CaptureSite


class OperandChanges:
    """Operands of the recomputes in one forward and backward pass, by the index of the recomputed value."""

    def __init__(self, static: frozenset[int]) -> None:
        """Start without operands; `static` has the addresses of memory that every plan holds."""
        self.captured = Unrecorded(static)
        self.sites: dict[int, set[CaptureSite]] = {}
        """Sites at which operands of each value were captured. A plan captures them only in the call that saves the
        value.
        """
        self._memory: dict[int, set[int]] = {}
        """For each value, the storages of operands that no recompute produces: parameters and other existing tensors.
        """
        self._versions: list[tuple[Tensor, int]] = []
        """Versions of parameters when forward began. DistributedDataParallel writes to all buffers in each forward."""

    def begin_forward(self, parameters: Iterable[Tensor]) -> None:
        """Record the versions of parameters at the model's first call; a later call before backward may change them."""
        if not self._versions:
            self._versions = [(p, p._version) for p in parameters if not p.is_inference()]

    def reads(self, index: int, maker: Recompute) -> None:
        """Record the storages that `maker`, the recompute of the value at `index`, reads."""
        self._memory[index] = _collect_storages(maker)

    def find_written_in_forward(self) -> set[int]:
        """Return the storages of parameters that were written to since forward began, for example by `max_norm`."""
        return {get_storage_id(p) for p, version in self._versions if p._version != version} - {0}

    def take_overwritten(self) -> set[int]:
        """Return the indices of values with an operand that has changed since the audit recorded it. Then forget all
        operands, except the sites of captured operands.
        """
        lost, written = self.captured.overwritten(), self.find_written_in_forward()
        indices = {index for index, sites in self.sites.items() if sites & lost}
        indices |= {index for index, memory in self._memory.items() if memory & written}
        self.captured.clear()
        self._memory.clear()
        self._versions.clear()
        return indices


def _collect_storages(maker: Recompute) -> set[int]:
    """Return the storages of all tensors that a recompute reads, by itself or through recomputes of its operands."""
    storages = set[int]()
    for value in (handle.value for handle in maker.operands if handle is not None):
        if isinstance(value.maker, Recompute):
            storages |= _collect_storages(value.maker)
        elif value.tensor is not None:
            storages.add(get_storage_id(value.tensor))
    return storages
