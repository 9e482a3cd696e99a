"""Rehearsal during real training steps, for a training loop that can't be called as a function.

One step is audited and another is traced, as in `rehearse`, but no step is run on trial and nothing is restored. Both
steps leave the same bits as plain steps, so training continues unaffected. The two batches may differ in size: then the
audit is rescaled to the sizes that the trace recorded (`rescale.py`).

The audit is always frugal, because the training loop can't repeat its first step if that runs out of memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lowtide.memory.lbfgs_history import predict_coming_history
from lowtide.memory.memory_timeline import Timeline
from lowtide.planner.records import LEFT_ALONE
from lowtide.profiler.checkpointed_blocks import CheckpointedCalls
from lowtide.profiler.differing_modules import find_differing_modules, list_modules_called_by
from lowtide.profiler.other_memory import NOTEWORTHY
from lowtide.profiler.peak_margin import DRAWS
from lowtide.profiler.preconditions import (
    check_one_device,
)
from lowtide.profiler.step_kinds import StepKinds, follow_rule
from lowtide.profiler.trace import MaxSavingEngine, Trace
from lowtide.profiler.training_step import (
    AuditedTrainingStep,
    Kind,
    OtherKind,
    RecordedStep,
    StepRecorder,
    TracedTrainingStep,
    TrainingAudit,
    Unusable,
    describe_form,
    describe_inputs,
    kind_of,
    measure_size,
    n_elements,
)
from lowtide.profiler.trial_updates import Update
from lowtide.runtime.fingerprint import find_device, fingerprint
from lowtide.runtime.live_optimizers import count_missing_state, find_optimizers, state_bytes
from lowtide.runtime.static_memory import static_bytes
from lowtide.state.process_group import check_sharding, n_with_new_buckets
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.planner.records import Fingerprint, Profile

DRAWN_LAYERS = (
    "Where layers are drawn at random, as with LayerDrop, lowtide.fit plans for the step in which every layer runs"
)
VARIES = (
    "the model does other work from step to step, as with LayerDrop: the plan is for the largest rehearsed step, "
    "blocks that did not run in it get the decisions of others of their class, and a larger step may exceed the budget"
)

IN_TURN = (
    "steps of several kinds take turns: the plan is for those that save and read most, and may not be enough for the "
    "others"
)

PATIENCE = 20
"""Number of steps for which the profiler waits for the largest size to recur. After these steps, the largest traced
size is used.
"""

WAIT_FOR_CALLS = PATIENCE - 6
"""Number of steps in which the profiler waits for the step that skips the fewest modules to come again. After these
steps, plans leave alone the modules that skip others.
"""

MOST_KINDS = 4
"""Largest number of kinds of steps, such as steps of alternating losses, that are distinguished; with more, work counts
as random.
"""

N_COMPARED = 6
"""Number of traced steps whose peaks are compared where steps vary irregularly, for a margin."""

GROWN = 2
"""Largest ratio of a batch to an audited batch at which the batch is not audited itself."""


class OnlineProfiler:
    """Profiler of `model` during its training; `profile` is set once enough steps were recorded.

    Each step is reported with `begin(batch)` before its first forward and `end()` after the optimizer's update;
    `leave()` removes all hooks from the model. The first batch is audited, as is each batch of a new form or of a much
    larger size; all other batches are traced. With `plain` one more step runs without any plan, for its true peak and
    time. The profile is made for the largest size so far, once two steps had that size; after PATIENCE steps, for the
    largest size that was traced. `why` lists the reasons why steps can't be used.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        plain: bool = False,
        in_place: bool = True,
        known_kinds: frozenset[Kind] = frozenset(),
    ) -> None:
        """Create a profiler of `model`. Given `known_kinds`, the profiler waits for a step of another kind."""
        self.model = model
        self._known_kinds = known_kinds
        self._in_place = in_place
        self.checkpointed = CheckpointedCalls()
        self.profile: Profile | None = None
        self.why: list[str] = []
        self.other_kind: str | None = None
        """Difference between the last step of an unexpected kind and the step with which it was compared."""
        self.n_steps = 0
        """Number of complete, usable steps."""
        self._plain = plain
        self._patience = PATIENCE
        """Number of steps during which the profiler waits for the largest size."""
        self._recording: StepRecorder | None = None
        self._kinds = StepKinds()
        self._best: TracedTrainingStep | None = None
        """Largest traced step, the latest of several."""
        self._largest: RecordedStep | None = None
        """Largest step of all."""
        self._fullest: RecordedStep | None = None
        """Step that saved most; of several such steps, the one whose backward read most."""
        self._steps_of: Counter[Fingerprint] = Counter()
        self._traced: dict[Fingerprint, list[tuple[Kind, int]]] = {}
        """Kind and lean peak of each traced step, by size: under like decisions they show what varies."""
        self._is_drawn = False
        """True once the model has called other modules than in an earlier step, or called them in another order."""
        self._left_alone: frozenset[str] = frozenset()
        """Paths of modules that plans leave alone, because they save different tensors in each step."""
        self._skipping: set[str] = set()
        """Paths of modules that call other modules in each step, as where layers are drawn at random."""
        self._to_come: Update | None = None
        """Update that is still to come, by optimizers of the model that have not stepped so far."""

    @property
    def n_sizes(self) -> int:
        """Number of batch sizes so far."""
        return len(self._steps_of)

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of the steps so far."""
        return self._kinds.all()

    def may_differ(self, *, creates_graph: bool) -> bool:
        """Return True if a later step may differ from the profiled step only in backward.

        It may if the profiled step left saved tensors unread. It also may if the later step `creates_graph` (a backward
        pass builds a graph itself) and the profiled step had no such pass.
        """
        if self._best is None:
            return False
        passes = self._best.kind.reads
        read = frozenset[int]().union(*(slots for _, slots in passes))
        return len(read) < len(self._best.drafts.slots) or creates_graph > any(graph for graph, _ in passes)

    @property
    def n_in_round(self) -> int:
        """The number of steps after which the sequence of kinds repeats itself, if a few kinds alternate; else 1."""
        return min(self._kinds.n_in_round, MOST_KINDS)

    def begin(self, batch: Any, optimizers: Iterable[Optimizer] = ()) -> None:
        """Begin a step, before the model is called with `batch`. Gradients may exist or not."""
        self.leave()
        if self.profile is not None:
            return
        check_one_device(self.model)
        check_sharding(self.model.modules())
        begun, place = fingerprint(self.model, batch), find_device(self.model)
        if any(size.model != begun.model for size in self._steps_of):
            self._forget()  # the loop trains other parameters now
        optimizers = tuple(optimizers)
        if self._kinds:
            self._to_come = Update.tried(self.model, optimizers)
        static, addresses = static_bytes(self.model, batch, optimizers)
        known, best = self._kinds.expected(describe_form(begun)), self._best
        recording = StepRecorder(begun, static, addresses, place)
        recording.n_with_new_buckets = n_with_new_buckets(self.model.modules())
        recording.start()
        self._recording = recording  # set after the start: a recording that failed to start must not be ended
        if known is None or measure_size(begun) > GROWN * measure_size(known.fingerprint):
            recording.audit = TrainingAudit(self.model, addresses, recording.mark, frugal=True, in_place=self._in_place)
            recording.audit.engine.excluded_modules = self._left_alone
            recording.installed.enter_context(recording.audit.running())
        elif not self._plain or best is None or best.fingerprint != begun or best.plain is not None:
            # Trace also when nothing remains to be measured: this needs the least memory.
            engine = MaxSavingEngine(self.model, known.audit, in_place=known.fingerprint == begun)
            engine.excluded_modules = self._left_alone
            recording.known, recording.engine, recording.trace = known, engine, Trace(engine, recording.mark)
            recording.installed.enter_context(recording.trace.running())

    def end(self) -> None:
        """End the recording of the step, and set `profile` if enough steps were recorded.

        Hooks of the optimizer may call this method, because it changes no hooks.
        """
        recording = self._recording
        if recording is None or not recording.is_running:
            return
        took_ms = recording.end()
        try:
            if recording.audit is not None:
                recording.audit.engine.is_over = True
                audited = AuditedTrainingStep(recording.size, recording.audit, recording.recorder)
                self._kinds.add_audited(describe_form(recording.size), audited)
                self._compare(audited)
                self.checkpointed = recording.audit.checkpointed
            elif recording.known is not None and recording.trace is not None:
                self._trace(recording, recording.known, recording.trace)
            elif self._best is not None:
                peak_bytes = recording.seen_static.total + Timeline(recording.recorder.stream).peak_bytes
                self._best.plain = peak_bytes, took_ms
        except OtherKind as why:
            self.other_kind = str(why)
        except Unusable as why:
            self.why.append(str(why))
            return
        else:
            self._steps_of[recording.size] += 1
        self.n_steps += 1
        self._set_profile(may_wait=self.n_steps < self._patience)

    def _trace(self, recording: StepRecorder, known: AuditedTrainingStep, trace: Trace) -> None:
        """Add a step that was traced under decisions from the audited step `known`.

        Raises Unusable if the two steps do different work, and then drops `known` if such batches need another audit.
        """
        audit, is_alike = known.audit, recording.size == known.fingerprint
        form = describe_form(recording.size)
        n_kinds = self._kinds.add(form, kind_of(trace.calls, trace.reads))
        if differing := find_differing_modules(audit.shapes, trace.calls):
            difference = (
                f"it saved {trace.packs} tensors in {len(trace.calls)} calls, and another step on a batch of "
                f"{'the same size' if is_alike else 'such a form'}, {known.fingerprint.batch}, saved "
                f"{len(audit.step.slots)} in {len(audit.step.calls)}"
            )
            if "" in differing and n_kinds <= MOST_KINDS:
                raise OtherKind(difference)
            skipping = {
                path
                for path in differing - {""}
                if list_modules_called_by(path, audit.shapes) != list_modules_called_by(path, trace.calls)
            }
            self._skipping |= skipping
            if skipping and self.n_steps < WAIT_FOR_CALLS:
                self._kinds.expect_skips(form)
                raise OtherKind(difference)
            self._kinds.forget_form(form)
            self._is_drawn |= "" in differing
            if "" not in differing:
                self._leave_alone(differing | self._skipping)
            raise Unusable(difference)
        if trace.inputs != audit.inputs and (is_alike or len(trace.inputs) != len(audit.inputs)):
            if n_elements(trace.inputs) > n_elements(audit.inputs):
                self._kinds.forget_form(form)
            raise Unusable(
                f"it called the model with {describe_inputs(trace.inputs)}, and another step that began with "
                f"{'the same' if is_alike else 'such a'} batch with {describe_inputs(audit.inputs)}"
            )
        if recording.n_with_new_buckets != n_with_new_buckets(self.model.modules()):
            raise Unusable("DistributedDataParallel has put its buckets in another order in it")
        traced = TracedTrainingStep(recording, known, trace)
        self._traced.setdefault(recording.size, []).append((traced.kind, traced.lean_peak_bytes()))
        if self._best is None or traced.extent() >= self._best.extent():
            self._best = traced
        self._compare(traced)

    def _leave_alone(self, paths: frozenset[str]) -> None:
        """Exclude the modules at `paths` from plans, and forget all steps so far."""
        self._left_alone |= paths
        self._forget()

    def _forget(self) -> None:
        self._kinds, self._best, self._largest, self._fullest = StepKinds(), None, None, None
        self._steps_of.clear()
        self._traced.clear()

    def _compare(self, step: RecordedStep) -> None:
        if self._largest is None or step.extent() > self._largest.extent():
            self._largest = step
        if self._fullest is None or step.fullness > self._fullest.fullness:
            self._fullest = step

    def finish(self) -> None:
        """Make the profile from the largest traced step, if any, because no further steps will come."""
        if self.profile is None:
            self._set_profile(may_wait=False)

    def restart(self) -> None:
        """Forget all steps so far except their audits, and make a new profile for larger batches.

        One traced step, on a batch of any size that the audits cover, completes the profile.
        """
        self.profile, self._best, self._largest, self._fullest = None, None, None, None
        self._steps_of.clear()
        self._patience = 0

    def give_up(self) -> None:
        """Stop recording. Hooks of the optimizer may call this method; `leave` must still be called afterwards."""
        if self._recording is not None:
            self._recording.end()

    def leave(self) -> None:
        """Remove all hooks from the model and give up an unfinished step. Must not be called by optimizer hooks."""
        if self._recording is not None:
            recording, self._recording = self._recording, None
            recording.end()
            recording.installed.close()

    def _list_left_alone_notes(self) -> Iterator[str]:
        """Yield the notes on modules that plans leave alone."""
        if others := sorted(self._left_alone - self._skipping):
            yield f"{LEFT_ALONE} saves something else in each step: {', '.join(others)}"
        if skipping := sorted(self._left_alone & self._skipping):
            yield f"{LEFT_ALONE} calls other modules in each step: {', '.join(skipping)}. {DRAWN_LAYERS}"

    def _with_state(self, profile: Profile) -> Profile:
        """Return `profile` with the optimizer state that steps of other kinds have allocated, or may allocate."""
        place = find_device(self.model)
        coming_bytes, note = predict_coming_history(known := find_optimizers(self.model))
        if coming_bytes >= NOTEWORTHY * profile.static.total:
            profile = replace(profile, notes=(*profile.notes, note))
        optimizers = [o for o in known if o.state and not isinstance(o, torch.optim.LBFGS)]
        n, missing_bytes = count_missing_state(optimizers, place)
        made_bytes = state_bytes(optimizers, place) + missing_bytes - profile.static.optimizer
        if made_bytes <= 0:
            return profile
        static = replace(profile.static, optimizer=profile.static.optimizer + made_bytes)
        what = f"{n} parameters got no gradient in the rehearsed steps"
        note = f"{what}: {format_bytes(missing_bytes)} of optimizer state that they may get later is counted"
        return replace(profile, static=static, notes=(*profile.notes, *([note] if missing_bytes else [])))

    def _varies(self, best: TracedTrainingStep) -> bool:
        """Return True if steps like `best` may need more memory, depending on the contents of tensors or on the saved
        tensors that backward reads.
        """
        return best.is_sized_by_contents or self._kinds.are_irregular(describe_form(best.fingerprint), best.kind.calls)

    def _reads_all(self, best: TracedTrainingStep) -> bool:
        """Return True if `best` has read every saved tensor that backward read in any traced step of this size."""
        traced = self._traced[best.fingerprint]
        read = frozenset[int]().union(*(slots for kind, _ in traced for _, slots in kind.reads))
        return read <= frozenset[int]().union(*(slots for _, slots in best.kind.reads))

    def _with_margin(self, profile: Profile, best: TracedTrainingStep) -> Profile:
        """Return `profile` with a margin for what varied between traced steps of one size."""
        traced = self._traced[best.fingerprint]
        peaks = [peak_bytes for _, peak_bytes in traced]
        has_fullest = self._reads_all(best)
        alike = [peak_bytes for kind, peak_bytes in traced if kind == best.kind or not has_fullest]
        margin = max(peaks) - best.lean_peak_bytes()
        margin += max(alike) - min(alike) if self._varies(best) else 0  # a sample rarely includes the true maximum
        if margin <= 0:
            return profile
        static = replace(profile.static, margin=profile.static.margin + margin)
        note = f"plans leave {format_bytes(margin)} for what varied between {len(traced)} rehearsed steps"
        return replace(profile, static=static, notes=(*profile.notes, note))

    def _set_profile(self, *, may_wait: bool) -> None:
        """Make the profile from the largest traced step, unless waiting for further steps is worthwhile."""
        best, largest, fullest = self._best, self._largest, self._fullest
        if best is None or largest is None or fullest is None:
            return
        is_largest = best.extent() >= largest.extent() and self._steps_of[best.fingerprint] > 1
        is_awaited = self._kinds.are_awaited or self._kinds.is_early(describe_form(best.fingerprint), best.kind)
        has_compared = len(self._traced[best.fingerprint]) >= N_COMPARED and self._reads_all(best)
        is_awaited |= self._varies(best) and not has_compared
        is_largest = is_largest and not is_awaited and not self.kinds <= self._known_kinds
        if not may_wait or (is_largest and (best.plain is not None or not self._plain)):
            profile, alone = best.profile(self.model, fullest), tuple(sorted(self._left_alone))
            if self._to_come is not None:
                profile = self._to_come.counted(profile)
            profile = self._with_margin(self._with_state(profile), best)
            notes = [*self._list_left_alone_notes()]
            notes += best.unread_notes()
            several = self._kinds.several()
            is_drawn = self._is_drawn or self._kinds.are_drawn or not all(map(follow_rule, several))
            if several and not is_drawn:
                notes.append(IN_TURN)
            if is_drawn:
                profile, notes = replace(profile, draws=DRAWS), [*notes, VARIES]
            self.profile = replace(profile, excluded_modules=alone, notes=(*profile.notes, *notes))
