"""Memory that CUDA's kernels and libraries take from the allocator without being asked by an operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide import _torch
from lowtide.memory.cards import Card, cublas_workspace_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.foresight.device.backend import NAME  # noqa: F401

aten = torch.ops.aten

PRODUCTS = frozenset(
    {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._scaled_mm.default}
)

WORKSPACE = "cublas::workspace"
"""Name of the operator that those blocks are put down to."""


class Takes:
    """In the place of `Scratch` for a card."""

    def __init__(self, card: Card, device: str) -> None:
        self._device = device
        workspace = card.cublas_workspace_bytes()
        self._workspace = cublas_workspace_bytes((8, 0)) if workspace is None else workspace
        self._handles: set[bool] = set()
        self.unknown: tuple[str, ...] = ()

    def of(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], made: list[Tensor]
    ) -> tuple[dict[int, int], list[int]]:
        """Sizes of results that differ from what their fake storages say, by number, and bytes inside the operator."""
        return {}, []

    def lasting(self, func: Any, tensors: list[Tensor]) -> list[int]:
        """A workspace for each thread's first product: backward runs in a thread of its own on CUDA."""
        if func not in PRODUCTS or tensors[0].device.type != self._device:
            return []
        thread = _torch.in_backward()
        if thread in self._handles:
            return []
        self._handles.add(thread)
        return [self._workspace]
