"""Measure the host's time that the engine takes for a saved tensor, beyond the operators that it runs.

The tensors have a few bytes, so that only the host's work is measured. The result is the same for every model.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowtide.runtime.engine import Engine
from lowtide.runtime.plan_table import parse_actions

COUNT = 64
"""Number of saved tensors in the measured step."""
RUNS = 8
"""Number of timed runs, of which the fastest counts. In two untimed runs before, the engine learns the plan."""


class SlotCosts(NamedTuple):
    """Host milliseconds that the engine adds for one saved tensor that is kept, and for one that is recomputed (recipe
    excluded).
    """

    kept: float
    packed: float


class _Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(COUNT):
            x = x.tanh()
        return x


@functools.cache
def slot_costs() -> SlotCosts:
    """Return the least milliseconds that the engine adds to a step for a kept and for a recomputed tensor."""
    model, start = _Chain(), torch.full((4,), 0.5, requires_grad=True)

    def step() -> None:
        model(start).sum().backward()

    def operators() -> None:
        with torch.no_grad():
            for _ in range(COUNT):
                start.tanh()

    def planned_ms(recomputed: range) -> float:
        engine = Engine(model, parse_actions({f"#0:{n}": "TanhBackward0" for n in recomputed}, ()))
        engine.install()
        try:
            return _measure_fastest_ms(step)
        finally:
            engine.remove()

    with torch.enable_grad():
        plain, alone = _measure_fastest_ms(step), _measure_fastest_ms(operators)
        one, all_ = planned_ms(range(COUNT - 1, COUNT)), planned_ms(range(1, COUNT))
    return SlotCosts(kept=max(0.0, one - plain) / COUNT, packed=max(0.0, all_ - plain - alone) / COUNT)


def _measure_fastest_ms(run: Callable[[], None]) -> float:
    for _ in range(2):
        run()
    fastest = float("inf")
    for _ in range(RUNS):
        began = time.perf_counter()
        run()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest * 1000
