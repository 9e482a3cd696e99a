"""What is in memory during one step, measured: as it is, or under a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lowtide.levers import of_plan
from lowtide.memory.measure import recorder_for
from lowtide.memory.memory_timeline import Timeline
from lowtide.planner.records import Plan
from lowtide.profiler.block_labels import Names, labels
from lowtide.profiler.preconditions import check
from lowtide.profiler.trace import address
from lowtide.runtime.fingerprint import Optimizers, check_made_for, place_of, tensors_in
from lowtide.runtime.planned_engine import Planned
from lowtide.state.step_arguments import of_one_argument
from lowtide.state.step_snapshot import StepSnapshot

if TYPE_CHECKING:
    from torch import nn


def timeline(
    model: nn.Module,
    step: Callable[..., Any],
    batch: Any,
    *,
    plan: Plan | None = None,
    optimizer: Optimizers = None,
) -> Timeline:
    """What is in memory after each allocation of one `step(batch)`, by category and module, without or under a plan.

    Bytes are over entry: parameters and whatever else exists before the step are not in it. The step is run twice, the
    second time is shown (when the optimizer has its state), and afterwards everything is as it was. `optimizer` is
    needed where one of the plan's levers changes it. Raises RehearsalError for a step that can't be rehearsed,
    StalePlan for a plan of another model, LowtideError for a lever that can't be put on.
    """
    step = of_one_argument(step, batch)
    check(model, step, batch)
    if plan is not None:
        Plan.expect(plan, "timeline")
        check_made_for(plan.fingerprint, model)
    with StepSnapshot(model, batch, optimizer, step) as unchanged, of_plan(plan, model, optimizer):
        step = unchanged.run
        step(batch)
        with recorder_for(place_of(model)) as recorder:
            names = Names(Planned(model, *([] if plan is None else [plan])), recorder.mark)
            with names.running():
                step(batch)
            state = [t for o in unchanged.optimizers for entry in o.state.values() for t in tensors_in(entry)]
            recorder.mark("optimizer state", tuple(address(t) for t in state))
    return Timeline(recorder.stream, labels(recorder.stream, names))
