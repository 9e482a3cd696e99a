"""Measure the contents of memory during one step, plain or under a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lowtide.levers import enable_plan_levers
from lowtide.memory.measure import make_recorder
from lowtide.memory.memory_timeline import Timeline
from lowtide.planner.records import Plan
from lowtide.profiler.block_labels import LabelledTrace, labels
from lowtide.profiler.preconditions import check_can_rehearse
from lowtide.profiler.trace import address
from lowtide.profiler.trace_marks import TRACE, OptimizerState
from lowtide.runtime.fingerprint import check_made_for, find_device
from lowtide.runtime.live_optimizers import Optimizers, list_optimizer_state
from lowtide.runtime.planned_engine import PlannedEngine
from lowtide.state.step_arguments import accept_batch
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
    """Record the memory in use after each allocation of one `step(batch)`, by category and module.

    The step is run twice, plain or under a plan, and the second run is recorded (the optimizer then has its state). All
    state is restored.

    Args:
        model: The model, on its device.
        step: Runs forward and backward of `model`, and optionally the optimizer. It is called with the batch, or with
            the items of a tuple or list as separate arguments.
        batch: The batch, in any nesting of containers.
        plan: The plan to run the step under; None for the plain step.
        optimizer: The optimizer, or a list of them; needed if one of the plan's levers changes it.

    Returns:
        The timeline, in bytes above those in use when the step begins: parameters, for example, are excluded.

    Raises:
        RehearsalError: If the step can't be rehearsed.
        StalePlan: If the plan is of another model.
        LowtideError: If a lever can't be enabled.

    Example:
        >>> import torch, lowtide
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> batch = torch.ones(128, 64)
        >>> def step(batch):
        ...     model(batch).square().mean().backward()
        >>> timeline = lowtide.timeline(model, step, batch)
        >>> timeline.peak_bytes
        491784
    """
    step = accept_batch(step, batch)
    check_can_rehearse(model, step, batch)
    if plan is not None:
        Plan.expect(plan, "timeline")
        check_made_for(plan.fingerprint, model)
    with StepSnapshot(model, batch, optimizer, step) as snapshot, enable_plan_levers(plan, model, optimizer):
        step = snapshot.run
        step(batch)
        with make_recorder(find_device(model)) as recorder:
            trace = LabelledTrace(PlannedEngine(model, *([] if plan is None else [plan])), recorder.mark)
            with trace.running():
                step(batch)
            state = map(address, list_optimizer_state(snapshot.optimizers))
            recorder.mark(TRACE, OptimizerState(tuple(state)))
    return Timeline(recorder.stream, labels(recorder.stream, trace))
