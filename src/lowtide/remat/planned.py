"""The engine with a plan, and with what the plan has for larger batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.remat import values
from lowtide.remat.actions import actions_for
from lowtide.remat.engine import Engine
from lowtide.remat.given import no_larger, shapes_in, shapes_of

if TYPE_CHECKING:
    from torch import nn

    from lowtide.planner.records import Plan
    from lowtide.remat.seam import Seam


class Planned(Engine):
    """An engine that does what a plan says; nothing without one."""

    def __init__(self, model: nn.Module, plan: Plan | None) -> None:
        decided = [] if plan is None else [plan] if plan.larger is None else [plan, plan.larger]
        tables = [actions_for(d.remake, d.replay, d.advance, d.offload) for d in decided]
        super().__init__(model, *(tables or [{}]))
        self.mixed = frozenset(plan.mixed if plan is not None else ())
        self._given = [shapes_in(words) for words in (plan.given if plan is not None else ())]

    def choose(self, seam: Seam, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """What is for larger batches where the call is given more than any that was rehearsed."""
        number = 0
        if len(self.tables) > 1 and self._given:
            found = shapes_of(args, kwargs)
            number = int(not any(no_larger(found, most) for most in self._given))
        return number if self.tables[number] or values.probe is not None else None  # a probe is told what is kept
