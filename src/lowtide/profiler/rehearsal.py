"""The runs of a rehearsal: an audited step, a traced step and a plain step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lowtide._torch.checkpointed_functions import without_checkpoints
from lowtide._torch.device_timing import now_ms
from lowtide.errors import LowtideError, RehearsalError, ReplayMismatch
from lowtide.memory.measure import make_recorder
from lowtide.memory.memory_timeline import Timeline
from lowtide.planner.records import Profile
from lowtide.profiler.assemble import TracedStep, assemble
from lowtide.profiler.audit import Audit
from lowtide.profiler.host_bandwidth import host_bandwidth
from lowtide.profiler.other_memory import put_in_words, with_others
from lowtide.profiler.preconditions import (
    SEVERAL_STREAMS,
    by_contents,
    check_same_work,
    check_saved,
    did_same_work,
    is_specialised,
    list_nondeterminism_notes,
)
from lowtide.profiler.random_work import OTHER_DRAWS, Draw, called, drawn_as, fullest
from lowtide.profiler.replay_trials import CHANGED
from lowtide.profiler.step_sections import TimedSections, time_sections
from lowtide.profiler.trace import MaxSavingEngine, Trace
from lowtide.profiler.trial_updates import Updates
from lowtide.runtime.fingerprint import find_device, fingerprint
from lowtide.runtime.host_rng import read_numpy_state, read_python_state
from lowtide.runtime.static_memory import static_bytes
from lowtide.runtime.tensor_writers import Overwritten
from lowtide.state.process_group import check_waits_for_no_process, n_sent
from lowtide.state.step_outcome import is_out_of_memory, unless_out_of_memory
from lowtide.state.step_snapshot import StepSnapshot
from lowtide.utils.progress import Stage

if TYPE_CHECKING:
    from torch import nn

    from lowtide.memory.events import Recorder
    from lowtide.planner.records import Fingerprint, Static

Step = Callable[[Any], Any]

OVERFLOWS: Final = (
    "there is a GradScaler, and no optimizer stepped in the rehearsal: if one does in training, the memory of its "
    "update comes on top"
)
NOT_MEASURED: Final = "the plain step ran out of memory: its peak is predicted"


class Rehearsal:
    """Runs of one step from the same state, from which its profile is made."""

    def __init__(
        self, model: nn.Module, batch: Any, unchanged: StepSnapshot, updates: Updates, *, in_place: bool
    ) -> None:
        self.model, self.batch = model, batch
        self.made_for = fingerprint(model, batch)
        self._unchanged, self._updates, self._in_place = unchanged, updates, in_place
        self._refused: dict[int, str] = {}  # by id: a metaclass may make its classes unhashable
        """Module classes that are not replayed, with the reasons."""
        self._orders: set[tuple[str, ...]] = set()
        """Sequences of module calls seen so far, one for each order."""
        self._draws_on_host = False
        """True if a run drew numbers from the generators of Python or NumPy."""

    @property
    def is_random(self) -> bool:
        """True if a second run of the step has called other modules than the first run, or in another order."""
        return len(self._orders) > 1

    def vary(self) -> None:
        """Find out if the step's work is random: run it with other random numbers, until a run calls other modules.

        Nothing runs unless the step draws from Python or NumPy: these numbers mostly decide what runs, and the runs so
        far may have called the same modules by chance.
        """
        if self.is_random or not self._draws_on_host:
            return
        for draw in OTHER_DRAWS:
            with drawn_as(draw.share):
                calls = self._run_under(draw)
            if calls:  # else the step failed
                self._orders.add(tuple(calls))
            if len(self._orders) > 1:
                break
        self._unchanged.seed(None)
        self._unchanged.restore()

    def specialise(self) -> None:
        """Run the step once if parts of the model are compiled or TorchScript: later runs save different tensors."""
        if is_specialised(self.model):
            self._updates.step(self.batch)
            self._unchanged.restore_for_rerun()

    def profiled(self) -> tuple[Attempt, Profile]:
        """Rehearse the step under the current random numbers; return its audit and trace, and its profile."""
        attempt = self._without_mismatch()
        if not did_same_work(attempt.audit, attempt.trace):  # the first run may have filled a cache of the program
            self._unchanged.restore()
            attempt = self._without_mismatch()
        # An audit needs more memory than the plain step, so the plain step may still fit. On a CPU, running out of
        # memory may end the process.
        hopeless = attempt.frugal and find_device(self.model).type == "cpu"
        # gradients are at other addresses than before the trace
        static, places = static_bytes(self.model, self.batch, self._unchanged.optimizers)
        plain, step_ms = (None, 0.0) if hopeless else self._plain()
        self._draw_as_before()
        sections = None if plain is None else time_sections(self.model, self._updates, self.batch)
        measured = None
        if plain is not None:
            measured = with_others(static, places, plain).total + Timeline(plain.stream).peak_bytes
        check_same_work(self.model, attempt.audit, attempt.trace)
        notes = [NOT_MEASURED] * (measured is None) + [OVERFLOWS] * self._unchanged.overflows + [*self._updates.notes()]
        return attempt, attempt.profile(self.model, self.made_for, (measured, step_ms), notes, sections)

    def find_fullest_draw(self) -> Draw:
        """Return the random numbers under which the step calls the most modules."""
        return fullest(self._run_under)

    def without_checkpoints(self) -> Attempt | None:
        """Audit and trace the step with torch.utils.checkpoint disabled; None if it can't be rehearsed that way."""
        self._unchanged.restore()
        try:
            with without_checkpoints():
                saved = self._attempt(frugal=True)
        except LowtideError:  # for example, the step does not fit; the note then lacks this number
            return None
        return saved if saved.trace.packs == len(saved.audit.step.slots) else None

    def _without_mismatch(self) -> Attempt:
        """Audit and trace the step, refusing module classes whose replay differs in backward from their forward."""
        while True:
            try:
                return self._attempt()
            except (ReplayMismatch, Overwritten) as error:
                if error.module_class is not None and id(error.module_class) not in self._refused:
                    self._refused[id(error.module_class)] = CHANGED
                elif not (isinstance(error, Overwritten) and error.is_of_parameter):
                    raise
            self._unchanged.restore()

    def _attempt(self, *, frugal: bool = False) -> Attempt:
        audit, frugal = self._audited(frugal=frugal)
        self._updates.follow()
        self._updates.undo()
        static = static_bytes(self.model, self.batch, self._unchanged.optimizers)
        self._unchanged.restore_for_rerun()
        engine, sent = MaxSavingEngine(self.model, audit), n_sent()
        trace, recorder = unless_out_of_memory(lambda: _trace(engine, self._run, self.batch), _make_fit_error)
        check_waits_for_no_process(sent)
        return Attempt(audit, frugal, static, engine, trace, recorder)

    def _audited(self, *, frugal: bool) -> tuple[Audit, bool]:
        """Audit the step. Also return True if the audit is frugal, as asked or because a full audit did not fit."""
        try:
            return self._audit_without_leak(frugal=frugal), frugal
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        gc.collect()  # outside `except`, so that the frames of the failed step, and all that they hold, can be freed
        self._unchanged.restore()
        return unless_out_of_memory(lambda: self._audit_without_leak(frugal=True), _make_fit_error), True

    def _audit_without_leak(self, *, frugal: bool) -> Audit:
        while (audit := self._audit(frugal=frugal)).leaked:
            self._unchanged.restore()
        return audit

    def _audit(self, *, frugal: bool) -> Audit:
        _, static = static_bytes(self.model, self.batch, ())
        name = type(self.model).__name__
        auditing = Stage(f"auditing {name}", total=sum(1 for _ in self.model.modules()))
        with auditing, make_recorder(find_device(self.model)) as recorder:
            audit = Audit(
                self.model, static, recorder.mark, frugal=frugal, refused=self._refused, in_place=self._in_place
            )
            with audit.running():
                try:
                    self._updates.step(self.batch)
                except ReplayMismatch:  # backward reached tensors that a trial run had leaked outside its call
                    if not audit.leaked:
                        raise
            auditing.result = f"audited {len(audit.step.calls)} module calls of {name}"
        if audit.leaked:
            return audit
        check_saved(self.model, audit)
        if not audit.step.slots:
            raise RehearsalError(
                f"the step returned without a call of {name} that saved anything for backward. Pass the very module "
                "that the step calls (not a wrapped or copied one), and do not call it under no_grad."
            )
        if len(audit.streams) > 1:
            raise RehearsalError(SEVERAL_STREAMS)
        if not audit.reads:
            raise RehearsalError("the step ran no backward through the model: call loss.backward() inside it.")
        audit.complete_drafts(recorder.stream)
        return audit

    def _plain(self) -> tuple[Recorder | None, float]:
        """Record the step without any plan, and time it; None for the recording if the step runs out of memory."""
        place = find_device(self.model)
        self._updates.undo()
        try:
            self._draw_as_before()
            with make_recorder(place) as recorder:
                self._run(self.batch)
            self._updates.undo()
            self._draw_as_before()
            began = now_ms(place)  # time an unrecorded step: recording takes time, and the first step loads kernels
            self._updates.step(self.batch)
            step_ms = now_ms(place) - began
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None, 0.0
        return recorder, step_ms

    def _draw_as_before(self) -> None:
        """Restore the random numbers of the audited step if its work is known to be random.

        Otherwise the next run draws other numbers, to find out if the work is random.
        """
        if self.is_random:
            self._unchanged.restore_for_rerun()

    def _run(self, batch: Any) -> None:
        """Run the step and the updates that follow it, and note the order of module calls."""
        python, numpy = read_python_state(), read_numpy_state()
        with called(self.model) as calls:
            self._updates.run(batch)
        self._orders.add(tuple(calls))
        self._draws_on_host |= read_python_state() is not python or read_numpy_state() is not numpy

    def _run_under(self, draw: Draw) -> list[str]:
        """Return the modules called by a step run from the initial state under `draw`; an empty list if it raises."""
        self._unchanged.seed(draw.seed)
        self._unchanged.restore()
        with called(self.model) as calls:
            try:
                self._updates.step(self.batch)
            except Exception:  # for example, every layer is dropped
                calls.clear()
        return calls


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a rehearsal: the step, audited and then traced."""

    audit: Audit
    frugal: bool
    static_before: tuple[Static, frozenset[int]]
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
        audit, place = self.audit, find_device(model)
        static = with_others(*self.static_before, self.recorder)
        traced = TracedStep(
            drafts=audit.step,
            kept=self.trace.kept,
            replayed=self.engine.decisions.replay,
            stream=self.recorder.stream,
            entry=self.recorder.entry_addresses,
            input_shapes=audit.inputs,
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
            notes=(*list_nondeterminism_notes(model, place), *by_contents(audit), *notes, *put_in_words(model, static)),
        )


def _make_fit_error(said: str) -> RehearsalError:
    return RehearsalError(
        f"the step runs out of memory even if each repeated block is freed as soon as it has run: {said}\n  "
        "Rehearse it with a smaller batch (lowtide.accumulate builds a large batch from small ones), or free memory "
        "on the device. lowtide.estimate(model, step, batch) estimates what the step needs without running it."
    )


def _trace(engine: MaxSavingEngine, step: Step, batch: Any) -> tuple[Trace, Recorder]:
    with make_recorder(find_device(engine.model)) as recorder:
        trace = Trace(engine, recorder.mark)
        with trace.running():
            step(batch)
    return trace, recorder
