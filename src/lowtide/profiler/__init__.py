"""Rehearse a training step: measure the memory of each saved tensor, and the cost of recomputing it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from lowtide.errors import RehearsalError
from lowtide.planner.planning import plain_peak_bytes
from lowtide.planner.records import AS_A_WHOLE, Decisions, Profile
from lowtide.planner.simulate.simulator import predict
from lowtide.profiler.checkpointed_blocks import can_do_without, with_checkpoint_notes
from lowtide.profiler.peak_margin import DRAWS, with_margin
from lowtide.profiler.preconditions import (
    check_can_rehearse,
    check_not_scripted,
    has_planned_blocks,
    is_planned_by_its_compiler,
)
from lowtide.profiler.random_work import drawn_as
from lowtide.profiler.rehearsal import Rehearsal
from lowtide.profiler.trial_updates import Updates
from lowtide.runtime.live_optimizers import Optimizers
from lowtide.state.step_snapshot import StepSnapshot
from lowtide.units import format_bytes
from lowtide.utils.interrupts import interrupts_delayed
from lowtide.utils.progress import Stage

if TYPE_CHECKING:
    from torch import nn


__all__ = ["OTHER_WORK", "REPLAYED_WHOLE", "rehearse"]

Step = Callable[[Any], Any]

RUNS: Final = 3
"""Number of steps that follow the audit: a traced step, a plain step, and a step under the plan with the smallest
peak.
"""

DOUBTFUL: Final = 0.02
"""Share of the plain peak by which two runs may differ before a note is added."""
DOUBTFUL_BYTES: Final = 2**19
"""Bytes by which two runs may always differ: the trace holds packed bits and random numbers, which matter in a tiny
model.
"""


REPLAYED_WHOLE: Final = f"compiled blocks are {AS_A_WHOLE}"
OTHER_WORK: Final = (
    "if the work depends on random numbers, as with LayerDrop, on the values of parameters, as where experts are "
    "chosen, on lengths that are in the batch, as of packed sequences, or on counts and iterators of the step's own, "
    "plans hold only for what was done in the rehearsal"
)


@interrupts_delayed()
def rehearse(
    model: nn.Module,
    step: Step,
    batch: Any,
    *,
    optimizer: Optimizers = None,
    in_place: bool = True,
    inside_blocks: bool = True,
) -> Profile:
    """Return the profile of `step(batch)`, run five times; `lowtide.rehearse` documents the effects on the model.

    With `inside_blocks`, plans decide which tensors are saved inside blocks that inductor compiles, and leave other
    modules alone. Without it, such blocks can only be replayed as a whole.
    """
    check_can_rehearse(model, step, batch, optimizer)
    check_not_scripted(model)
    is_whole = is_planned_by_its_compiler(model, step)
    if is_whole or (inside_blocks and has_planned_blocks(model)):
        from lowtide.profiler.compiled_steps import rehearse_compiled  # imports inductor, which takes seconds

        try:
            return rehearse_compiled(model, step, batch, optimizer=optimizer)
        except RehearsalError as why:
            if is_whole:
                raise
            note = f"{REPLAYED_WHOLE}, as their code can't be planned: {why}"
        profile = rehearse(model, step, batch, optimizer=optimizer, in_place=in_place, inside_blocks=False)
        return replace(profile, notes=(*profile.notes, note))
    name = type(model).__name__
    with (
        Stage(f"rehearsing {name}", total=RUNS) as stage,
        StepSnapshot(model, batch, optimizer, step) as unchanged,
        Updates(unchanged, model, optimizer) as updates,
    ):
        rehearsal = Rehearsal(model, batch, unchanged, updates, in_place=in_place)
        rehearsal.specialise()
        attempt, profile = rehearsal.profiled()
        rehearsal.vary()
        if rehearsal.is_random:
            draw = rehearsal.find_fullest_draw()
            unchanged.seed(draw.seed)
            unchanged.restore()
            with drawn_as(draw.share, most=math.inf):  # the step is known to end under this draw, and runs often here
                attempt, profile = rehearsal.profiled()
            unchanged.seed(None)
            unchanged.restore()
            profile = replace(profile, draws=DRAWS)
        profile = with_margin(profile, model, updates, batch, unchanged)
        checkpointed = attempt.audit.checkpointed
        saved = rehearsal.without_checkpoints() if checkpointed.by_torch and can_do_without(model) else None
        peak_bytes = plain_peak_bytes(profile)
        stage.result = f"rehearsed {name}: {format_bytes(peak_bytes)} peak of the plain step"
    without = None if saved is None else saved.profile(model, rehearsal.made_for, (None, 0.0))
    return with_checkpoint_notes(with_mismatch_note(profile), checkpointed, without)


def with_mismatch_note(profile: Profile) -> Profile:
    """Return `profile`, with a note if its predicted plain peak differs from the plain peak measured in another run."""
    measured, predicted = profile.measured_plain_peak_bytes, predict(profile, Decisions()).peak_bytes
    predicted -= profile.static.margin
    if measured is None or abs(predicted - measured) <= max(DOUBTFUL_BYTES, DOUBTFUL * measured):
        return profile
    note = (
        f"of two runs without a plan one has a peak of {format_bytes(predicted)}, one of {format_bytes(measured)}: "
        f"{OTHER_WORK}"
    )
    return replace(profile, notes=(*profile.notes, note))
