"""What CUDA's kernels and libraries take from the allocator inside of operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide import _torch
from lowtide.foresight.behaviours.behaviour import Inside
from lowtide.foresight.behaviours.products import PRODUCTS, workspace_bytes
from lowtide.foresight.behaviours.table import INSIDE
from lowtide.foresight.device.current import NAME

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.memory.cards import Card


class Takes:
    """Answers for a card what `Scratch` answers for the machine at hand."""

    def __init__(self, card: Card) -> None:
        self._workspace = workspace_bytes(card)
        self._handles: set[bool] = set()

    def inside(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> list[Inside]:
        """The blocks that an operator on the card takes and gives back."""
        rule = INSIDE.get(func)
        return [] if rule is None or not _on_card(made) else rule(args, kwargs, made)

    def lasting(self, func: Any, made: list[Tensor]) -> int:
        """The workspace that a thread's first product takes. Backward runs in a thread of its own on CUDA."""
        thread = _torch.in_backward()
        if func not in PRODUCTS or thread in self._handles or not _on_card(made):
            return 0
        self._handles.add(thread)
        return self._workspace


def _on_card(made: list[Tensor]) -> bool:
    return any(tensor.device.type == NAME for tensor in made)
