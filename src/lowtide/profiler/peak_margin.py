"""Measure by how many bytes a step's peak exceeds its prediction, under the plan with the smallest peak."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from lowtide.memory.measure import make_recorder
from lowtide.memory.memory_timeline import Timeline
from lowtide.memory.reserved_peak import compute_reserved_excess
from lowtide.planner.planning import find_smallest_plan
from lowtide.profiler.other_memory import with_others
from lowtide.profiler.random_work import HIGH, LOW, drawn_as
from lowtide.runtime.fingerprint import find_device
from lowtide.runtime.planned_engine import PlannedEngine
from lowtide.runtime.static_memory import static_bytes
from lowtide.state.step_outcome import is_out_of_memory
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from lowtide.memory.events import Recorder
    from lowtide.planner.records import Profile, Static
    from lowtide.profiler.trial_updates import Updates
    from lowtide.state.step_snapshot import StepSnapshot
    from lowtide.utils.amounts import BudgetFor

DRAWS: Final = 8
"""Number of steps that are measured if the work is random, each with other random numbers."""


def with_margin(profile: Profile, model: nn.Module, updates: Updates, batch: Any, unchanged: StepSnapshot) -> Profile:
    """Return `profile` with all peaks raised by the bytes that a measured step needs beyond its predicted peak.

    The step runs under the plan with the smallest peak, because errors name that peak as a budget that works.
    """
    plan = find_smallest_plan(profile, "flops")
    engine = PlannedEngine(model, plan)
    engine.messages.tell = lambda said: None
    if profile.measured_plain_peak_bytes is None:  # a step that failed midway may leave any state behind
        unchanged.restore()
    unchanged.restore_for_rerun()
    engine.install()
    try:
        peaks = [recorded_peak(model, updates, batch, unchanged) for _ in range(1 + profile.draws)]
        full = (
            measure_peaks_with_all_blocks(lambda: recorded_peak(model, updates, batch, unchanged))
            if profile.draws
            else []
        )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return profile
    finally:
        engine.remove()
    margin = max(0, max(peaks) - plan.predicted.peak_bytes)
    if margin and profile.draws:  # a sample rarely includes the true maximum
        margin += (max(peaks) - min(peaks)) // 2
    margin = max([margin, *(peak_bytes - plan.predicted.peak_bytes for peak_bytes in full)])
    with_room = replace(profile, static=replace(profile.static, margin=margin))
    if not profile.draws:
        return with_room
    note = (
        "the work of a step is drawn at random, as with LayerDrop: plans are for the step in which every block runs, "
        f"and leave {format_bytes(margin)} for what else varied in {profile.draws} steps with other random numbers"
    )
    return replace(with_room, notes=(*profile.notes, note))


def measure_peaks_with_all_blocks(measured: Callable[[], int]) -> list[int]:
    """Measure a step twice, with all random numbers high and then low; return its peaks in bytes.

    If blocks are skipped at random, one of the two steps runs all blocks. `measured` runs a step and returns its peak.
    A step that raises an error has no peak; out-of-memory errors are raised again.
    """
    peaks = []
    for share in (HIGH, LOW):
        with drawn_as(share):
            try:
                peaks.append(measured())
            except Exception as error:  # raised, for example, if every layer is dropped
                if is_out_of_memory(error):
                    raise
    return peaks


def recorded_peak(
    model: nn.Module, updates: Updates, batch: Any, unchanged: StepSnapshot, budget_for: BudgetFor = "requested"
) -> int:
    """Return the peak of a step and of the updates that follow it, including memory in use before the step."""
    static, addresses = static_bytes(model, batch, unchanged.optimizers)
    with make_recorder(find_device(model)) as recorder:
        updates.run(batch)
    updates.undo()
    return peak_of(static, addresses, recorder, budget_for)


def peak_of(static: Static, addresses: frozenset[int], recorder: Recorder, budget_for: BudgetFor) -> int:
    """Return a recorded step's peak in the bytes that `budget_for` names, with memory from before the step."""
    peak_bytes = with_others(static, addresses, recorder).total + Timeline(recorder.stream).peak_bytes
    return peak_bytes + (compute_reserved_excess(recorder) if budget_for == "reserved" else 0)
