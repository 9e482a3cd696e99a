"""The engine with a plan, and with what the plan has for larger batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lowtide.runtime import saved_values as values
from lowtide.runtime.call_shapes import elements, shapes_in, shapes_of
from lowtide.runtime.engine import Engine
from lowtide.runtime.plan_table import Actions, actions_for, with_like_blocks

if TYPE_CHECKING:
    from torch import nn

    from lowtide.planner.records import Decided, Plan
    from lowtide.runtime.call_interceptor import Seam


def table_of(decided: Decided) -> dict[str, dict[int, Actions]]:
    """What the engine does, as `Engine` takes it."""
    return actions_for(decided.recompute, decided.replay, decided.advance, decided.offload)


class Planned(Engine):
    """An engine that does what a plan says; nothing without one."""

    def __init__(self, model: nn.Module, plan: Plan | None) -> None:
        decided = [] if plan is None else [plan] if plan.fallback is None else [plan, plan.fallback]
        tables = [*map(table_of, decided)] or [{}]
        if plan is not None and plan.draws:
            tables = [with_like_blocks(model, table) for table in tables]
        super().__init__(model, *tables, in_place=[each.in_place for each in decided])
        self.excluded_modules = frozenset(plan.excluded_modules if plan is not None else ())
        self.ambiguous_addresses = frozenset(plan.ambiguous_addresses if plan is not None else ())
        given = () if plan is None else plan.input_shapes
        self.of_a_part: Callable[[tuple[Any, ...], dict[str, Any]], None] = lambda args, kwargs: None
        """Told of what a part of the model is given that a step calls by itself."""
        self._most = max((elements(shapes_in(words)) for words in given), default=None)

    def choose(self, seam: Seam, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """What is for larger batches where a call is given more elements than any that was rehearsed.

        One that is longer and has fewer rows, as where batches are put together by their tokens, is none.
        """
        if seam.module is not self.model:
            self.of_a_part(args, kwargs)
        if len(self.tables) > 1 and self._most is not None:
            return int(elements(shapes_of(args, kwargs)) > self._most)
        return 0

    def keeps_all(self, plan: int) -> bool:
        return not self.tables[plan] and values.probe_of(self) is None  # which is told what is kept, too
