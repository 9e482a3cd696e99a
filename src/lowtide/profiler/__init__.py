"""Rehearse a training step: measure the memory of each saved tensor, and the cost of recomputing it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from lowtide._torch.device_timing import now_ms
from lowtide.errors import LowtideError, RehearsalError, ReplayMismatch
from lowtide.memory.measure import recorder_for
from lowtide.memory.memory_timeline import Timeline
from lowtide.planner.planning import plain_peak_bytes
from lowtide.planner.records import AS_A_WHOLE, Decisions, Profile
from lowtide.planner.simulate.simulator import predict
from lowtide.profiler.assemble import TracedStep, assemble
from lowtide.profiler.audit import CHANGED, Audit
from lowtide.profiler.checkpointed_blocks import can_do_without, with_checkpoint_note, without_checkpoints
from lowtide.profiler.host_bandwidth import host_bandwidth
from lowtide.profiler.other_memory import in_words, with_others
from lowtide.profiler.peak_margin import DRAWS, with_margin
from lowtide.profiler.preconditions import (
    SEVERAL_STREAMS,
    by_contents,
    check,
    check_not_scripted,
    check_same_work,
    check_saved,
    has_planned_blocks,
    is_planned_by_its_compiler,
    is_specialised,
    nondeterminism_notes,
)
from lowtide.profiler.random_work import Draw, called, drawn_as, fullest
from lowtide.profiler.step_sections import TimedSections, timed_sections
from lowtide.profiler.trace import MaxSavingEngine, Trace
from lowtide.profiler.trial_updates import Updates
from lowtide.runtime.fingerprint import fingerprint, place_of
from lowtide.runtime.live_optimizers import Optimizers
from lowtide.runtime.static_memory import static_bytes
from lowtide.runtime.tensor_writers import Overwritten
from lowtide.state.process_group import check_waits_for_no_process, n_sent
from lowtide.state.step_outcome import is_out_of_memory, unless_out_of_memory
from lowtide.state.step_snapshot import StepSnapshot
from lowtide.units import format_bytes
from lowtide.utils.interrupts import interrupts_delayed
from lowtide.utils.progress import Stage

if TYPE_CHECKING:
    from torch import nn

    from lowtide.memory.events import Recorder
    from lowtide.planner.records import Fingerprint, Static

__all__ = ["OTHER_WORK", "REPLAYED_WHOLE", "rehearse"]

Step = Callable[[Any], Any]
T = TypeVar("T")

RUNS: Final = 3
"""Number of steps that follow the audit: the traced one, the plain one, and the one under the plan with the smallest
peak.
"""

DOUBTFUL: Final = 0.02
"""Share of the plain peak by which two runs may differ before a note is added."""
DOUBTFUL_BYTES: Final = 2**19
"""Bytes by which two runs may always differ: the trace holds packed bits and random numbers, which matter in a tiny
model.
"""


OVERFLOWS: Final = (
    "there is a GradScaler, and no optimizer stepped in the rehearsal: if one does in training, what it needs for that "
    "comes on top"
)
NOT_MEASURED: Final = "the plain step ran out of memory: its peak is predicted"
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
    check(model, step, batch, optimizer)
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
        step, made_for = updates.step, fingerprint(model, batch)
        if is_specialised(model):
            step(batch)
            unchanged.restore_for_rerun()
        refused: dict[type[nn.Module], str] = {}
        orders: set[tuple[str, ...]] = set()
        """Sequences of module calls seen so far, one for each order."""

        def run(batch: Any) -> Any:
            with called(model) as calls:
                result = updates.run(batch)
            orders.add(tuple(calls))
            return result

        def tried(*, frugal: bool = False) -> _Tried:
            audit, frugal = _audited(model, step, batch, unchanged, refused, in_place, frugal=frugal)
            updates.follow()
            updates.undo()
            static = static_bytes(model, batch, unchanged.optimizers)
            unchanged.restore_for_rerun()
            engine, sent = MaxSavingEngine(model, audit), n_sent()
            trace, recorder = unless_out_of_memory(lambda: _trace(engine, run, batch), _does_not_fit)
            check_waits_for_no_process(sent)
            return _Tried(audit, frugal, static, engine, trace, recorder)

        def profiled() -> tuple[_Tried, Profile]:
            attempt = _without_mismatch(tried, unchanged, refused)
            # An audit needs more memory than the plain step, so the plain step may still fit. On a CPU, running out of
            # memory may end the process.
            hopeless = attempt.frugal and place_of(model).type == "cpu"
            static, places = static_bytes(model, batch, unchanged.optimizers)  # gradients lie at other addresses now
            plain, step_ms = (None, 0.0) if hopeless else _plain(model, updates, batch, run)
            sections = None if plain is None else timed_sections(model, updates, batch)
            measured = None
            if plain is not None:
                measured = with_others(static, places, plain).total + Timeline(plain.stream).peak_bytes
            check_same_work(model, attempt.audit, attempt.trace)
            notes = [NOT_MEASURED] * (measured is None) + [OVERFLOWS] * unchanged.overflows + [*updates.notes()]
            return attempt, attempt.profile(model, made_for, (measured, step_ms), notes, sections)

        attempt, profile = profiled()
        if len(orders) > 1:
            draw = fullest(lambda draw: _calls(model, step, batch, unchanged, draw))
            if draw != Draw():
                unchanged.seed(draw.seed)
                unchanged.restore()
                with drawn_as(draw.share):
                    attempt, profile = profiled()
            unchanged.seed(None)
            unchanged.restore()
            profile = replace(profile, draws=DRAWS)
        profile = with_margin(profile, model, updates, batch, unchanged)
        saved = _without_checkpoints(tried, unchanged) if attempt.audit.checkpointed and can_do_without(model) else None
        peak_bytes = plain_peak_bytes(profile)
        stage.result = f"rehearsed {name}: {format_bytes(peak_bytes)} peak of the plain step"
    without = None if saved is None else saved.profile(model, made_for, (None, 0.0))
    return with_checkpoint_note(with_mismatch_note(profile), attempt.audit.checkpointed, without)


@dataclass(frozen=True, slots=True)
class _Tried:
    """One attempt at a rehearsal: the step, audited and then traced."""

    audit: Audit
    frugal: bool
    there: tuple[Static, frozenset[int]]
    """Static memory before the step was traced, and its addresses."""
    engine: MaxSavingEngine
    trace: Trace
    recorder: Recorder

    def profile(
        self,
        model: nn.Module,
        made_for: Fingerprint,
        plain: tuple[int | None, float],
        notes: Iterable[str] = (),
        sections: TimedSections | None = None,
    ) -> Profile:
        """Return the profile, given the plain step's peak and time, and the times of its sections."""
        audit, place = self.audit, place_of(model)
        static = with_others(*self.there, self.recorder)
        traced = TracedStep(
            values=audit.values,
            slots=audit.slots,
            calls=audit.calls,
            kept=self.trace.kept,
            replayed=self.engine.decisions.replay,
            stream=self.recorder.stream,
            entry=self.recorder.entry_addresses,
            given=audit.inputs,
            written_over=audit.written_over,
            allows_in_place=audit.allows_in_place,
            implementations=audit.implementations,
        )
        return assemble(
            traced,
            fingerprint=made_for,
            static=static,
            plain=plain,
            sections=sections,
            offload_bytes_per_ms=host_bandwidth(place),
            notes=(*nondeterminism_notes(model, place), *by_contents(audit), *notes, *in_words(model, static)),
        )


def _without_checkpoints(tried: Callable[..., _Tried], unchanged: StepSnapshot) -> _Tried | None:
    """Audit and trace the step with torch.utils.checkpoint disabled; None if it can't be rehearsed that way."""
    unchanged.restore()
    try:
        with without_checkpoints():
            saved = tried(frugal=True)
    except LowtideError:  # for example, the step does not fit; the note then lacks this number
        return None
    return saved if saved.trace.packs == len(saved.audit.slots) else None


def _calls(model: nn.Module, step: Step, batch: Any, unchanged: StepSnapshot, draw: Draw) -> list[str]:
    """Return the modules called by a step run from the initial state under `draw`; an empty list if it raises."""
    unchanged.seed(draw.seed)
    unchanged.restore()
    with called(model) as calls:
        try:
            step(batch)
        except Exception:  # for example, every layer is dropped
            calls.clear()
    return calls


def _does_not_fit(said: str) -> RehearsalError:
    return RehearsalError(
        f"the step runs out of memory even if each repeated block is freed as soon as it has run: {said}\n  "
        "Rehearse it with a smaller batch (lowtide.accumulate builds a large batch from small ones), or free memory "
        "on the device. lowtide.estimate(model, step, batch) estimates what the step needs without running it."
    )


def with_mismatch_note(profile: Profile) -> Profile:
    """Return `profile`, with a note if its peak differs from the plain step's, which draws other random numbers."""
    measured, predicted = profile.measured_plain_peak_bytes, predict(profile, Decisions()).peak_bytes
    predicted -= profile.static.margin
    if measured is None or abs(predicted - measured) <= max(DOUBTFUL_BYTES, DOUBTFUL * measured):
        return profile
    note = (
        f"of two runs without a plan one has a peak of {format_bytes(predicted)}, one of {format_bytes(measured)}: "
        f"{OTHER_WORK}"
    )
    return replace(profile, notes=(*profile.notes, note))


def _without_mismatch(run: Callable[[], T], unchanged: StepSnapshot, refused: dict[type[nn.Module], str]) -> T:
    """Return the result of `run`, refusing module classes whose replay differs in backward from their forward."""
    while True:
        try:
            return run()
        except (ReplayMismatch, Overwritten) as error:
            if error.module_class is not None and error.module_class not in refused:
                refused[error.module_class] = CHANGED
            elif not (isinstance(error, Overwritten) and error.is_of_parameter):
                raise
        unchanged.restore()


def _audited(
    model: nn.Module,
    step: Step,
    batch: Any,
    unchanged: StepSnapshot,
    refused: dict[type[nn.Module], str],
    in_place: bool,
    *,
    frugal: bool = False,
) -> tuple[Audit, bool]:
    """Return the audit, and True if it is a frugal one, because a full one did not fit."""

    def repeated(*, frugal: bool) -> Audit:
        while (audit := _audit(model, step, batch, frugal, refused, in_place)).leaked:
            unchanged.restore()
        return audit

    try:
        return repeated(frugal=frugal), frugal
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    gc.collect()  # outside `except`, so that the frames of the failed step, and all that they hold, can be freed
    unchanged.restore()
    return unless_out_of_memory(lambda: repeated(frugal=True), _does_not_fit), True


def _audit(
    model: nn.Module, step: Step, batch: Any, frugal: bool, refused: dict[type[nn.Module], str], in_place: bool
) -> Audit:
    _, static = static_bytes(model, batch, ())
    name = type(model).__name__
    auditing = Stage(f"auditing {name}", total=sum(1 for _ in model.modules()))
    with auditing, recorder_for(place_of(model)) as recorder:
        audit = Audit(model, static, recorder.mark, frugal=frugal, refused=refused, in_place=in_place)
        with audit.running():
            try:
                step(batch)
            except ReplayMismatch:  # backward reached tensors that a trial run had leaked outside its call
                if not audit.leaked:
                    raise
        auditing.result = f"audited {len(audit.calls)} module calls of {name}"
    if audit.leaked:
        return audit
    check_saved(model, audit)
    if not audit.slots:
        raise RehearsalError(
            f"the step returned without a call of {name} that saved anything for backward. Pass the very module that "
            "the step calls (not a wrapped, compiled or copied one), and do not call it under no_grad."
        )
    if len(audit.streams) > 1:
        raise RehearsalError(SEVERAL_STREAMS)
    if not audit.reads:
        raise RehearsalError("the step ran no backward through the model: call loss.backward() inside it.")
    audit.settle(recorder.stream)
    return audit


def _trace(engine: MaxSavingEngine, step: Step, batch: Any) -> tuple[Trace, Recorder]:
    with recorder_for(place_of(engine.model)) as recorder:
        trace = Trace(engine, recorder.mark)
        with trace.running():
            step(batch)
    return trace, recorder


def _plain(model: nn.Module, updates: Updates, batch: Any, run: Step) -> tuple[Recorder | None, float]:
    """Record the step without any plan, and time it; None for the recording if the step runs out of memory."""
    place = place_of(model)
    updates.undo()
    try:
        with recorder_for(place) as recorder:
            run(batch)
        updates.undo()
        began = now_ms(place)  # time a second, unrecorded step: recording takes time, and the first step loads kernels
        updates.step(batch)
        step_ms = now_ms(place) - began
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None, 0.0
    return recorder, step_ms
