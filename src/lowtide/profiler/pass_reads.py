"""Saved tensors that each backward pass of a step reads: steps with an equal forward may differ in backward."""

from __future__ import annotations

from typing import TypeAlias

import torch

from lowtide._torch.backward import backward_number

ReadSlots: TypeAlias = tuple[tuple[bool, frozenset[int]], ...]
"""For each backward pass in order: True if it builds a graph itself, and the slots that it reads."""


class PassReads:
    """Collector of the slots that are read in each backward pass."""

    def __init__(self) -> None:
        self._passes: dict[int, tuple[bool, set[int]]] = {}

    def __bool__(self) -> bool:
        """Return True if any slot was read."""
        return bool(self._passes)

    def add(self, slot: int) -> None:
        """Add a slot that the backward pass in progress reads."""
        number = backward_number()
        if number not in self._passes:
            self._passes[number] = torch.is_grad_enabled(), set()
        self._passes[number][1].add(slot)

    def slots(self) -> ReadSlots:
        """Return, for each backward pass, True if it builds a graph itself, and the slots that it has read."""
        return tuple((creates_graph, frozenset(slots)) for creates_graph, slots in self._passes.values())
