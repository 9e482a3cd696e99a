"""Engine for plans of several batch sizes. Batches larger than all of these run under the last plan's fallback, if it
has one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from lowtide.runtime import saved_values as values
from lowtide.runtime.call_interceptor import CallInterceptor, find_interceptors
from lowtide.runtime.call_shapes import count_elements_in, elements, parse_shapes
from lowtide.runtime.engine import Engine
from lowtide.runtime.known_calls import KnownCalls
from lowtide.runtime.plan_table import Actions, parse_actions, with_like_blocks
from lowtide.runtime.recipes import IMPLEMENTATIONS

if TYPE_CHECKING:
    from torch import nn

    from lowtide.planner.records import Decided, Plan


def make_action_table(decided: Decided) -> dict[str, dict[int, Actions]]:
    """Return a plan's decisions by module path and call number, as `Engine` takes them."""
    return parse_actions(decided.recompute, decided.replay, decided.advance, decided.offload)


def find_most_elements(plan: Plan) -> float:
    """Return the number of elements in the arguments of the largest call that `plan` is for; infinity if the plan names
    no shapes.
    """
    return max((elements(parse_shapes(words)) for words in plan.input_shapes), default=inf)


def estimate_fitting_elements(plan: Plan) -> float:
    """Return the largest number of elements in a call's arguments for which a step without a plan is within the budget;
    0 if it is unknown.

    The step's held activations are assumed to grow with that number, and all other memory to be as in a full step.
    """
    held_bytes = plan.plain.held_bytes
    room_bytes = plan.budget_bytes - (plan.plain.peak_bytes - held_bytes)
    most = find_most_elements(plan)
    return most * room_bytes / held_bytes if held_bytes and most < inf and plan.budget_for == "requested" else 0.0


def find_shared_implementations(plans: Sequence[Plan]) -> dict[str, str]:
    """Return the alternative implementations of recipes on which all plans agree, by node name.

    All other nodes use the recipe itself.
    """
    common = dict(plans[0].implementations) if plans else {}
    return {
        node: name
        for node, name in common.items()
        if name in IMPLEMENTATIONS.get(node, ()) and all(p.implementations.get(node) == name for p in plans)
    }


class PlannedEngine(Engine):
    """An engine that carries out `plans`, ordered from the smallest batch size; without plans it changes nothing."""

    def __init__(self, model: nn.Module, *plans: Plan) -> None:
        decided: list[Decided] = [*plans]
        if plans and plans[-1].fallback is not None:
            decided.append(plans[-1].fallback)
        tables = [*map(make_action_table, decided)] or [{}]
        if any(plan.draws for plan in plans):
            tables = [with_like_blocks(model, table) for table in tables]
        super().__init__(model, *tables, in_place=[each.in_place for each in decided])
        self.packer.builder.implementations = find_shared_implementations(plans)
        # where blocks are drawn at random, no two runs need the same tensors
        self.packer.draws = any(plan.draws for plan in plans)
        self.learning.is_possible = not self.packer.draws
        self.excluded_modules = frozenset(path for plan in plans for path in plan.excluded_modules)
        self.packer.ambiguous_addresses = frozenset(address for plan in plans for address in plan.ambiguous_addresses)
        self.of_a_part: Callable[[tuple[Any, ...], dict[str, Any], nn.Module], None] = lambda args, kwargs, part: None
        """Function called with the arguments of a part of the model that a step calls directly, and that part."""
        self.calls = KnownCalls()
        """The model's calls in rehearsed steps; a step that makes other calls runs under the plan with the smallest
        peak.
        """
        self._most = [find_most_elements(plan) for plan in plans]
        self._fit_plain = [estimate_fitting_elements(plan) for plan in plans]
        """For each plan, the number of elements of calls that need no plan."""
        self._saves_most_from = inf
        """Smallest number of elements of calls that run under the plan with the smallest peak, because such a call ran
        out of memory.
        """
        self.saves_most = False
        """True if the last call ran under the plan with the smallest peak."""

    def choose(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the index of the smallest plan for calls with at least as many elements as this call's arguments.

        If the call has more elements than all planned calls, or the step is of a kind that was not rehearsed, the last
        index is returned: the fallback's, if there is one. A call with longer but fewer rows, as in batches assembled
        by tokens, need not have more elements.
        """
        if interceptor.module is not self.model:
            self.of_a_part(args, kwargs, interceptor.module)
        if len(self.tables) > 1:
            n_elements = count_elements_in(args, kwargs)
            last = len(self.tables) - 1
            saves_most = self.calls.is_unlike or n_elements >= self._saves_most_from
            fits = last if saves_most else min(bisect_left(self._most, n_elements), last)
            self.saves_most = fits == last
            return fits
        return 0

    def has_room(self, plan: int, n_elements: int) -> bool:
        return plan < len(self._fit_plain) and 0 < n_elements <= self._fit_plain[plan]

    def save_most(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Use the plan with the smallest peak for calls of this size and larger from now on; return False if such calls
        use it already.
        """
        n_elements = count_elements_in(args, kwargs)
        if len(self.tables) == 1 or n_elements >= self._saves_most_from or n_elements > self._most[-1]:
            return False
        self._saves_most_from = n_elements
        return True

    def growth(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """Return how many times as many elements a call's arguments have as those of the largest planned call; at least
        1.
        """
        most = self._most[-1] if self._most else 0
        return max(1.0, count_elements_in(args, kwargs) / most) if 0 < most < inf else 1.0

    def keeps_all(self, plan: int) -> bool:
        return not self.tables[plan] and values.find_observer(self) is None  # observers get kept tensors, too


def planned_engine(model: nn.Module) -> PlannedEngine | None:
    """Return the engine whose plan is in force on `model` or on a module inside it; None without a plan."""
    fronts = (front for module in model.modules() for front in find_interceptors(module))
    engines = (front.engine for front in fronts if isinstance(front, CallInterceptor))
    return next((engine for engine in engines if isinstance(engine, PlannedEngine)), None)
