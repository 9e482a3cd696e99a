"""One training step that can be measured: its exact peak, its exact FLOPs, and its bits compared with the plain step's.

The step is forward and backward, with no gradients when it begins and none when it ends. There is no optimizer: its
time and memory are the same for every way, and would only make the differences look smaller.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from contest.flops import Flops
from contest.models import SEED, Batch, Contestant
from contest.pieces import Taken, taken
from lowtide.runtime.inplace_gradients import InPlacePermission
from lowtide.runtime.static_memory import static_bytes


@dataclass(frozen=True, slots=True)
class Bits:
    """Results of a step: loss, gradients and buffers."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


@dataclass(slots=True, eq=False)
class Steps:
    """The steps of one model. `call` runs the model's forward: the model itself, or a compiled version of it."""

    model: nn.Module
    batch: Batch
    call: Callable[..., Any]
    has_plan: bool = False
    """True if a plan of Lowtide may be in force. Without one, backward runs torch's own kernels, not Lowtide's in-place
    ones.
    """
    _look: Callable[[], None] | None = None
    _first_buffers: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._first_buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    @classmethod
    def of(cls, made: Contestant, *, has_plan: bool = False) -> Steps:
        return cls(made.model, made.batch, made.model, has_plan)

    def step(self, batch: Batch) -> Tensor:
        """Run forward and backward; return the loss. The output object, which holds the logits, is freed before
        backward.
        """
        loss: Tensor = self.call(**batch).loss
        with nullcontext() if self.has_plan else InPlacePermission("cpu", alone=True):  # allows nothing
            loss.backward()  # type: ignore[no-untyped-call]
        if self._look is not None:
            self._look()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()

    def reset(self) -> None:
        """Restore buffers and random numbers to the initial state. Parameters never change: there is no optimizer."""
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._first_buffers[name])
        torch.manual_seed(SEED + 1)

    def bits(self) -> Bits:
        """Run a step from the initial state, and return its results."""
        found: dict[str, Tensor] = {}
        self.reset()
        loss = self._looking(lambda: found.update(self._gradients()))
        return Bits(loss, found, {name: buffer.clone() for name, buffer in self.model.named_buffers()})

    def measure(self, plain: Bits) -> Measured:
        """Measure the peak of a step from the initial state, compare its bits with `plain`, and count FLOPs of another
        step.
        """
        unequal: list[str] = []

        def compare() -> None:
            mine = self._gradients()
            unequal.extend(n for n in mine.keys() | plain.gradients.keys() if not _equal(mine, plain.gradients, n))

        self.reset()
        static, _ = static_bytes(self.model, self.batch, ())
        with lowtide.measure(self.model) as memory:
            loss = self._looking(compare)
        buffers = dict(self.model.named_buffers())
        equal_buffers = all(_equal(buffers, plain.buffers, name) for name in plain.buffers)
        return Measured(
            peak_bytes=static.total + memory.peak_bytes,
            flops=self.flops(),
            equal_loss=torch.equal(loss, plain.loss),
            equal_gradients=not unequal,
            equal_buffers=equal_buffers,
        )

    def flops(self) -> int:
        """Count the FLOPs of one step, forward and backward, recomputes included. The counted operators are not
        computed.
        """
        with Flops(computes=False) as counter:
            self.step(self.batch)
        self.reset()
        return int(counter.total)

    def seconds(self) -> float:
        """Run one step, and return its time in seconds."""
        began = time.perf_counter()
        self.step(self.batch)
        return time.perf_counter() - began

    def taken(self) -> Taken:
        """Run one step, and return the times of its pieces."""
        return taken(lambda: self.step(self.batch))

    def _looking(self, look: Callable[[], None]) -> Tensor:
        self._look = look
        try:
            return self.step(self.batch)
        finally:
            self._look = None

    def _gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of a step, compared with the plain step. The fields are named like those of `records.Cell`."""

    peak_bytes: int
    flops: int
    equal_loss: bool
    equal_gradients: bool
    equal_buffers: bool

    def as_fields(self) -> dict[str, Any]:
        return asdict(self)


def _equal(mine: dict[str, Tensor], theirs: dict[str, Tensor], name: str) -> bool:
    return name in mine and name in theirs and torch.equal(mine[name], theirs[name])
