"""Apply a plan to a model: enable the plan's levers, and the engine that recomputes and replays saved tensors."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import nn

from lowtide._torch.compiled_code import has_compiled_modules, is_recompiling
from lowtide._torch.inductor import is_addmm_unfused, partition_by
from lowtide.levers import enable_plan_levers
from lowtide.planner.records import Plan
from lowtide.profiler.preconditions import check_is_module
from lowtide.profiler.replay_check import ReplayChecker
from lowtide.runtime.call_interceptor import owners
from lowtide.runtime.fingerprint import check_made_for
from lowtide.runtime.guards import Changed, PlanGuard, watch_bypass, watch_state_growth
from lowtide.runtime.known_calls import KnownCalls
from lowtide.runtime.live_optimizers import Optimizers
from lowtide.runtime.planned_engine import PlannedEngine
from lowtide.utils.interrupts import delay_interrupts, remove_if_interrupted
from lowtide.utils.removable import Removable
from lowtide.utils.rendering import Displayed, format_repr

if TYPE_CHECKING:
    from lowtide.runtime.joint_slots import JointSlots

_traced: weakref.WeakKeyDictionary[nn.Module, Applied] = weakref.WeakKeyDictionary()
"""Plans in force on models that compiled functions call, by model. Such a model gets no wrapper that could hold its
plan.
"""


def find_plan_holders(module: nn.Module) -> Iterator[object]:
    """Yield the objects, such as Applied, whose plans are in force on `module`."""
    yield from owners(module)
    if module in _traced:
        yield _traced[module]


def _forget(reference: weakref.ref[nn.Module]) -> None:
    model = reference()
    if model is not None:
        _traced.pop(model, None)


class Applied(Removable, Displayed):
    """A plan in force on a model. `remove()`, or the end of a `with` block, restores the model.

    `plan` is the plan for the largest batches. `holder` is the object that `lowtide.fitted` returns while the plan is
    in force, by default this object.
    """

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[Plan],
        optimizer: Optimizers,
        say: Callable[[str], None],
        outgrown: Callable[[str], bool] = lambda what: False,
        changed: Changed = lambda kind, what: False,
        calls: KnownCalls | None = None,
    ) -> None:
        """Put `plans` in force on `model`: one plan for each batch size, the smallest first.

        `say` is called with each message to the user. PlanGuard calls `outgrown` for a batch larger than planned, and
        `changed` for a changed model; if they return True, no message follows. `calls` are the module calls of the
        rehearsed steps; a step that makes other calls is recognized as a step of another kind.
        """
        self.plan = plan = plans[-1]
        self.holder: Removable = self
        self._changed = changed
        self._unknown: set[str] = set()
        """Hashes of compiled joint graphs that the plan does not cover."""
        reference = weakref.ref(self)

        def has_more_state() -> bool:
            applied = reference()
            return applied is not None and applied._changed("state", "")

        if plan.graphs:
            self._engine = PlannedEngine(nn.Module())  # decides nothing: the model's compiled code is planned instead
            with contextlib.ExitStack() as undo:
                undo.callback(enable_plan_levers(plan, model, optimizer).remove)
                if plan.predicted != plan.plain:
                    undo.callback(self._install_partitioner(model, say))
                if has_compiled_modules(model):
                    undo.callback(PlanGuard(model, plan, say, self, outgrown, changed).remove)
                else:  # compiled functions trace the model's calls, so no wrapper may surround them
                    _traced[model] = self
                    undo.callback(_forget, weakref.ref(model))  # a weak reference: `self` must not keep the model alive
                undo.callback(watch_state_growth(model, plan, say, has_more_state).remove)
                self._undo = undo.pop_all()
            return
        self._engine = PlannedEngine(model, *plans)
        messages = self._engine.messages
        messages.tell, messages.is_taken = say, lambda: changed("step", "")
        with contextlib.ExitStack() as undo:
            end_delay = weakref.finalize(self._engine, delay_interrupts())  # a plan may be freed with its model
            end_delay.atexit = False
            undo.callback(end_delay)
            if calls is not None:
                self._engine.calls = calls
            # before the levers, whose hooks run around the guard's, as they ran around the rehearsal's
            guard = PlanGuard(model, plan, say, self, outgrown, changed, calls)
            undo.callback(guard.remove)
            self._engine.of_a_part = guard.look
            undo.callback(enable_plan_levers(plan, model, optimizer).remove)
            undo.callback(watch_state_growth(model, plan, say, has_more_state).remove)
            if self._engine.does_anything:
                undo.callback(self._engine.remove)
                self._engine.install()
                undo.callback(watch_bypass(self._engine, say).remove)
            self._undo = undo.pop_all()

    @property
    def drifted(self) -> frozenset[str]:
        """Addresses of saved tensors, such as `h.0.mlp#0:1`, that were kept because they differed from the rehearsed
        ones; and hashes of compiled graphs that the plan does not cover.
        """
        return frozenset(self._engine.packer.drifted) | self._unknown

    def checked(self) -> AbstractContextManager[ReplayChecker]:
        """Return a context manager that checks the recomputed tensors of one step.

        It raises ReplayMismatch if a tensor that backward reads differs in any bit from the tensor that forward saved.
        """
        return ReplayChecker(self._engine).running()

    def save_most(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Run calls with arguments of this size, or larger, under the plan with the smallest peak from now on.

        Returns False if such calls already ran under that plan.
        """
        return self._engine.save_most(args, kwargs)

    def growth(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """Return the number of elements in these arguments, divided by that of the largest planned call; at least 1."""
        return self._engine.growth(args, kwargs)

    def also(self, remove: Callable[[], object]) -> None:
        """Register `remove`, a function to call just before the plan is removed."""
        self._undo.callback(remove)

    def _install_partitioner(self, model: nn.Module, say: Callable[[str], None]) -> Callable[[], None]:
        """Make inductor choose the saved tensors of compiled graphs by the plan; return a function that undoes this.

        Freeing `model` undoes it, too. `say` is called with warnings on graphs that the plan does not cover.
        """
        from lowtide.runtime.compiled_plan import PlanPartitioner  # imports inductor, which takes seconds

        keys = self._unknown  # inductor's settings hold the partitioner, which must not hold the model

        def unknown(key: str) -> None:
            if not keys:
                say(
                    "the plan does not cover a graph that was compiled, of another model or for another form of "
                    "batch: torch decides what it saves for backward, and the peak may be above the budget. If the "
                    "graph is of this model, fit again with the current batch."
                )
            keys.add(key)

        first: dict[str, int] = {}
        """Bytes of the inputs for which each graph was first compiled, by the graph's hash."""
        is_guarded, is_said = has_compiled_modules(model), False

        def say_larger_inputs(slots: JointSlots) -> None:
            nonlocal is_said
            n_bytes = sum(node.bytes for node in slots.joint.nodes if node.is_given)
            is_larger = n_bytes > first.setdefault(slots.joint.key, n_bytes) and is_recompiling()
            if is_larger and not (is_guarded or is_said):
                is_said = True
                say(
                    "a compiled function was compiled again for larger inputs: the peak may be above the budget. Plan "
                    "for the largest batch (in a script, let it come first)."
                )

        partitioner = PlanPartitioner(self.plan.graphs, self.plan.recompute, unfused=is_addmm_unfused())
        partitioner.unknown, partitioner.on_compile = unknown, say_larger_inputs
        weakly = next(model.parameters(), model)  # a script's model may be a stand-in
        return partition_by(partitioner, of=weakly, reuse=False)

    def __repr__(self) -> str:
        return format_repr(type(self).__name__, repr(self.plan))

    def __str__(self) -> str:
        return str(self.plan)

    def remove(self) -> None:
        """Remove the plan, which restores the model and the optimizer. Repeated calls do nothing."""
        self._undo.close()


def warn(message: str) -> None:
    """Issue `message` as a Python warning; the default for `say`, the argument of `apply`."""
    warnings.warn(message, stacklevel=2)


@remove_if_interrupted
def apply(model: nn.Module, plan: Plan, *, optimizer: Optimizers = None, say: Callable[[str], None] = warn) -> Applied:
    """Put a plan in force on `model`, until `.remove()` or the end of a `with` block.

    A batch that is larger than the planned one runs under the plan's fallback, which has the smallest peak.

    Args:
        model: The model that the plan was made for, or an equal one.
        plan: The plan, from `plan`, `fit` or a file.
        optimizer: The optimizer, or a list of them; needed if one of the plan's levers changes it.
        say: Called with a message, once for each reason: a larger batch came, more parameters are trained, optimizers
            made state that the plan does not count, compiled code bypasses the plan, or the step saves other tensors
            than the rehearsed step.

    Returns:
        The plan in force.

    Raises:
        StalePlan: If the plan was made for another model, device or version of torch; then nothing is in force.
        LowtideError: If a lever can't be enabled; then nothing is in force.

    Example:
        >>> import torch, lowtide
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> batch = torch.ones(128, 64)
        >>> def step(batch):
        ...     model(batch).square().mean().backward()
        >>> plan = lowtide.plan(lowtide.rehearse(model, step, batch), "90%")
        >>> with lowtide.apply(model, plan) as applied:
        ...     step(batch)
        ...     lowtide.fitted(model) is applied
        True
    """
    check_is_module(model)
    Plan.expect(plan, "apply")
    check_made_for(plan.fingerprint, model)
    return Applied(model, [plan], optimizer, say)
