"""Rehearsal during real training steps, for a training loop that can't be called as a function.

One step is audited and another is traced, as in `rehearse`, but no step is run on trial and nothing is restored. Both
leave the same bits as the plain step, so training continues unaffected. The two batches may differ in size: then the
audit is rescaled to the sizes that the trace recorded (`rescale.py`).

The audit is always a frugal one, because the training loop can't repeat its first step if that runs out of memory.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias

from lowtide._torch.device_timing import now_ms
from lowtide.errors import RehearsalError
from lowtide.memory.measure import recorder_for
from lowtide.memory.memory_timeline import Timeline
from lowtide.profiler.assemble import TracedStep, assemble
from lowtide.profiler.audit import Audit
from lowtide.profiler.differing_modules import modules_that_differ
from lowtide.profiler.host_bandwidth import host_bandwidth
from lowtide.profiler.other_memory import in_words, with_others
from lowtide.profiler.peak_margin import DRAWS
from lowtide.profiler.preconditions import (
    SEVERAL_STREAMS,
    by_contents,
    check_one_device,
    check_saved,
    nondeterminism_notes,
)
from lowtide.profiler.rescale import resized
from lowtide.profiler.trace import MaxSavingEngine, Trace
from lowtide.profiler.trial_updates import Update
from lowtide.runtime.call_shapes import elements, shapes_in
from lowtide.runtime.fingerprint import fingerprint, place_of
from lowtide.runtime.live_optimizers import optimizers_of
from lowtide.runtime.static_memory import static_bytes
from lowtide.state.process_group import check_sharding, n_with_new_buckets

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.memory.events import Recorder
    from lowtide.planner.records import Fingerprint, Profile, Static
    from lowtide.profiler.differing_modules import CallShape
    from lowtide.profiler.drafts import CallDraft, SlotDraft, ValueDraft
    from lowtide.runtime.call_interceptor import CallInterceptor
    from lowtide.runtime.replay import ReplayFrame

NOT_RUN = "no plain step was run: its peak is predicted"

VARIES = (
    "the model does other work from step to step, as with LayerDrop: the plan is for the largest rehearsed step, "
    "blocks that did not run in it get the decisions of others of their class, and a larger step may exceed the budget"
)

IN_TURN = (
    "steps of several kinds take turns: the plan is for those that save most, and may not be enough for the others"
)

PATIENCE = 20
"""Number of steps for which the profiler waits for the largest size to recur. After them the largest traced size is
used.
"""

MOST_KINDS = 4
"""Largest number of kinds of steps, such as steps of alternating losses, that are told apart; with more, work counts as
random.
"""

GROWN = 2
"""Largest ratio of a batch to an audited batch at which the batch is not audited itself."""


class OnlineProfiler:
    """Profiler of `model` during its training; `profile` is set once enough steps were recorded.

    Each step is reported with `begin(batch)` before its first forward and `end()` after the optimizer's update;
    `leave()` removes all hooks from the model. The first batch is audited, as is each batch of a new form or of a much
    larger size; all others are traced. With `plain` one more step runs without any plan, for its true peak and time.
    The profile is of the largest size so far, once that size came twice; after PATIENCE steps, of the largest size that
    was traced. `why` lists the reasons why steps can't be used.
    """

    def __init__(self, model: nn.Module, *, plain: bool = False, in_place: bool = True) -> None:
        self.model = model
        self._in_place = in_place
        self.checkpointed: Counter[str] = Counter()
        """Number of torch.utils.checkpoint calls by path of the module that they run in."""
        self.profile: Profile | None = None
        self.why: list[str] = []
        self.other_kind: str | None = None
        """Difference between the last step of a kind of its own and the step that it was compared with."""
        self.n_steps = 0
        """Number of complete, usable steps."""
        self._plain = plain
        self._patience = PATIENCE
        """Number of steps during which the profiler waits for the largest size."""
        self._watch: _StepRecorder | None = None
        self._audited: dict[str, list[_Audited]] = {}
        """Audited steps by form of the batch, one of each kind."""
        self._kinds: dict[str, list[Kind]] = {}
        """Kind of each step, by form of the batch."""
        self._best: _Traced | None = None
        """Largest traced step."""
        self._largest: _Audited | _Traced | None = None
        """Largest step of all."""
        self._fullest: _Audited | _Traced | None = None
        """Step that saved most."""
        self._steps_of: Counter[Fingerprint] = Counter()
        self._is_drawn = False
        """True once the model has called other modules than in an earlier step, or called them in another order."""
        self._left_alone: frozenset[str] = frozenset()
        """Paths of modules that plans leave alone, because they save different tensors in each step."""
        self._to_come: Update | None = None
        """Update that is still to come, by optimizers of the model that have not stepped so far."""

    @property
    def n_sizes(self) -> int:
        """Number of batch sizes so far."""
        return len(self._steps_of)

    def begin(self, batch: Any, optimizers: Iterable[Optimizer] = ()) -> None:
        """Begin a step, before the model is called with `batch`. Gradients may exist or not."""
        self.leave()
        if self.profile is not None:
            return
        check_one_device(self.model)
        check_sharding(self.model.modules())
        begun, place = fingerprint(self.model, batch), place_of(self.model)
        if any(size.model != begun.model for size in self._steps_of):
            self._forget()  # the loop trains other parameters now
        optimizers = tuple(optimizers)
        if self._audited:
            waiting = [o for o in optimizers_of(self.model, optimizers) if all(o is not known for known in optimizers)]
            self._to_come = Update.tried(self.model, waiting) if waiting else None
        static, addresses = static_bytes(self.model, batch, optimizers)
        known, best = self._expected(_form(begun)), self._best
        watch = _StepRecorder(begun, static, addresses, place)
        watch.n_with_new_buckets = n_with_new_buckets(self.model.modules())
        watch.start()
        self._watch = watch  # set after the start: a recording that failed to start must not be ended
        if known is None or _size(begun) > GROWN * _size(known.fingerprint):
            watch.audit = _OwnAudit(self.model, addresses, watch.mark, frugal=True, in_place=self._in_place)
            watch.audit.excluded_modules = self._left_alone
            watch.leave.enter_context(watch.audit.running())
        elif not self._plain or best is None or best.fingerprint != begun or best.plain is not None:
            # Trace also when nothing remains to be measured: this needs the least memory.
            engine = MaxSavingEngine(self.model, known.audit, in_place=known.fingerprint == begun)
            engine.excluded_modules = self._left_alone
            watch.known, watch.engine, watch.trace = known, engine, Trace(engine, watch.mark)
            watch.leave.enter_context(watch.trace.running())

    def end(self) -> None:
        """End the step. Hooks of the optimizer may call it: it changes no hooks."""
        watch = self._watch
        if watch is None or not watch.runs:
            return
        took_ms = watch.end()
        try:
            if watch.audit is not None:
                watch.audit.is_over = True
                audited = _Audited(watch.size, watch.audit, watch.recorder)
                others = [each for each in self._audited.get(_form(watch.size), []) if each.kind != audited.kind]
                self._audited[_form(watch.size)] = [*others, audited]
                self._kinds.setdefault(_form(watch.size), []).append(audited.kind)
                self._compare(audited)
                self.checkpointed = watch.audit.checkpointed
            elif watch.known is not None and watch.trace is not None:
                self._trace(watch, watch.known, watch.trace)
            elif self._best is not None:
                peak_bytes = watch.seen_static.total + Timeline(watch.recorder.stream).peak_bytes
                self._best.plain = peak_bytes, took_ms
        except _OtherKind as why:
            self.other_kind = str(why)
        except _Unusable as why:
            self.why.append(str(why))
            return
        else:
            self._steps_of[watch.size] += 1
        self.n_steps += 1
        self._settle(may_wait=self.n_steps < self._patience)

    def _trace(self, watch: _StepRecorder, known: _Audited, trace: Trace) -> None:
        """Use a traced step. Raises _Unusable; drops `known` if steps on such a batch need another audit."""
        audit, is_alike = known.audit, watch.size == known.fingerprint
        kinds = self._kinds.setdefault(_form(watch.size), [])
        kinds.append(kind_of(trace.calls))
        if differing := modules_that_differ(audit.shapes, trace.calls):
            difference = (
                f"it saved {trace.packs} tensors in {len(trace.calls)} calls, and another step on a batch of "
                f"{'the same size' if is_alike else 'such a form'}, {known.fingerprint.batch}, saved "
                f"{len(audit.slots)} in {len(audit.calls)}"
            )
            if "" in differing and len({*kinds}) <= MOST_KINDS:
                raise _OtherKind(difference)
            self._forget_form(_form(watch.size))
            self._is_drawn |= "" in differing
            if "" not in differing:
                self._leave_alone(differing)
            raise _Unusable(difference)
        if trace.inputs != audit.inputs and (is_alike or len(trace.inputs) != len(audit.inputs)):
            if _n_elements(trace.inputs) > _n_elements(audit.inputs):
                self._forget_form(_form(watch.size))
            raise _Unusable(
                f"it called the model with {_in_words(trace.inputs)}, and another step that began with "
                f"{'the same' if is_alike else 'such a'} batch with {_in_words(audit.inputs)}"
            )
        if watch.n_with_new_buckets != n_with_new_buckets(self.model.modules()):
            raise _Unusable("DistributedDataParallel has put its buckets in another order in it")
        traced = _Traced(watch, known, trace)
        if self._best is None or traced.extent() > self._best.extent():
            self._best = traced
        self._compare(traced)

    def _leave_alone(self, paths: frozenset[str]) -> None:
        """Exclude the modules at `paths` and start over."""
        self._left_alone |= paths
        self._forget()

    def _expected(self, form: str) -> _Audited | None:
        """Return the audited step that is of the kind that the next step is expected to be, if any."""
        kinds = self._kinds.get(form, [])
        n = next(_periods(kinds), 1)
        if 2 * n > len(kinds) and kinds[-2:-1] == kinds[-1:]:
            n = 1  # two steps of one kind tell more than a rule that has not come round twice
        kind = kinds[-n] if kinds else None
        return next((each for each in self._audited.get(form, []) if each.kind == kind), None)

    def _forget_form(self, form: str) -> None:
        """Forget the audited steps on batches of a form."""
        self._audited.pop(form, None)
        self._kinds.pop(form, None)

    @property
    def _awaits_kind(self) -> bool:
        """Return True if steps of some kind were traced but never audited, and kinds may take turns."""
        return any(
            {*kinds} - {each.kind for each in self._audited.get(form, [])} and take_turns(kinds, n_rounds=1)
            for form, kinds in self._kinds.items()
        )

    def _forget(self) -> None:
        self._audited, self._best, self._largest, self._fullest = {}, None, None, None
        self._kinds.clear()
        self._steps_of.clear()

    def _compare(self, step: _Audited | _Traced) -> None:
        if self._largest is None or step.extent() > self._largest.extent():
            self._largest = step
        if self._fullest is None or step.saved_bytes() > self._fullest.saved_bytes():
            self._fullest = step

    def finish(self) -> None:
        """Set the profile to that of the largest traced step, if any, because no further steps will come."""
        if self.profile is None:
            self._settle(may_wait=False)

    def restart(self) -> None:
        """Start over for larger batches; one traced step is enough, which any size covered by the audits gives.

        Only the audits of earlier steps are kept.
        """
        self.profile, self._best, self._largest, self._fullest = None, None, None, None
        self._steps_of.clear()
        self._patience = 0

    def give_up(self) -> None:
        """Stop recording. Hooks of the optimizer may call it; `leave` must still be called afterwards."""
        if self._watch is not None:
            self._watch.end()

    def leave(self) -> None:
        """Remove all hooks from the model and give up an unfinished step. Must not be called by optimizer hooks."""
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.end()
            watch.leave.close()

    def _settle(self, *, may_wait: bool) -> None:
        """Set the profile to that of the largest traced step, unless waiting for further steps is worthwhile."""
        best, largest, fullest = self._best, self._largest, self._fullest
        if best is None or largest is None or fullest is None:
            return
        is_largest = best.extent() >= largest.extent() and self._steps_of[best.fingerprint] > 1
        is_largest = is_largest and not self._awaits_kind
        if not may_wait or (is_largest and (best.plain is not None or not self._plain)):
            profile, alone = best.profile(self.model, fullest), tuple(sorted(self._left_alone))
            if self._to_come is not None:
                profile = replace(self._to_come.counted(profile), notes=(*profile.notes, *self._to_come.notes()))
            notes = [f"left alone, as it saves something else in each step: {', '.join(alone)}"] if alone else []
            several = [kinds for kinds in self._kinds.values() if len({*kinds}) > 1]
            is_drawn = self._is_drawn or not all(map(take_turns, several))
            if several and not is_drawn:
                notes.append(IN_TURN)
            if is_drawn:
                profile, notes = replace(profile, draws=DRAWS), [*notes, VARIES]
            self.profile = replace(profile, excluded_modules=alone, notes=(*profile.notes, *notes))


Kind: TypeAlias = tuple[tuple[str, int | None, int], ...]
"""Calls of modules in a step, each with the call around it and the number of tensors that it saved."""


def kind_of(calls: Iterable[CallShape]) -> Kind:
    """Return the kind of a step: the path, parent and number of saved tensors of each of its module calls."""
    return tuple((call.path, call.parent, call.n_saved) for call in calls)


def take_turns(kinds: list[Kind], n_rounds: int = 2) -> bool:
    """Return True if steps of several kinds follow a rule: one kind after the other, or `n_rounds` of the same ones.

    Steps that follow no rule may draw their work at random.
    """
    is_periodic = any(n_rounds * n <= len(kinds) for n in _periods(kinds) if n > 1)
    return is_periodic or len(list(groupby(kinds))) == len({*kinds})


def _periods(kinds: list[Kind]) -> Iterator[int]:
    """Yield, in order, the numbers of steps after which the kinds are the same again."""
    return (n for n in range(1, len(kinds)) if kinds[n:] == kinds[:-n])


class _Unusable(Exception):
    """Signal that a step can't be used; the text is the reason."""


class _OtherKind(_Unusable):
    """Signal that a step was of another kind than expected; the text is the difference."""


class _Audited:
    """The audit of one training step, and what later steps need of it."""

    def __init__(self, fingerprint: Fingerprint, audit: Audit, recorder: Recorder) -> None:
        """Complete the audit of a step. Raises _Unusable and RehearsalError."""
        if len(audit.streams) > 1:
            raise RehearsalError(SEVERAL_STREAMS)
        check_saved(audit.model, audit)
        if not audit.slots:
            raise _Unusable("the model saved nothing for backward")
        if not audit.reads:
            raise _Unusable("no backward ran through the model")
        audit.settle(recorder.stream)
        self.fingerprint, self.audit, self.kind = fingerprint, audit, kind_of(audit.shapes)

    def extent(self) -> tuple[int, int]:
        """Return a key that orders steps by size: elements of the inputs, then saved bytes. Saved bytes alone would
        mislead: a first call that creates state saves more.
        """
        return _n_elements(self.audit.inputs), self.saved_bytes()

    def saved_bytes(self) -> int:
        """Return the bytes of all tensors saved for backward."""
        return _saved_bytes(self.audit.values, self.audit.slots)


class _Traced:
    """A traced step, under the decisions that free the most memory, from an audit of this step or of a similar one."""

    def __init__(self, watch: _StepRecorder, audited: _Audited, trace: Trace) -> None:
        self.fingerprint = watch.size
        self.plain: tuple[int, float] | None = None
        """Peak in bytes and time in milliseconds of such a step without any plan."""
        assert watch.engine is not None
        self._watch, self._trace, self._decisions = watch, trace, watch.engine.decisions
        self._audit = audit = audited.audit
        self._is_alike = watch.size == audited.fingerprint
        self._values, self._calls = audit.values, audit.calls
        if not self._is_alike:
            self._values, self._calls = resized(
                audit.values, audit.slots, audit.calls, audited=audit.elements, traced=trace.elements
            )

    def extent(self) -> tuple[int, int]:
        """Return the step's size, comparable with that of an audited step."""
        return _n_elements(self._trace.inputs), self.saved_bytes()

    def saved_bytes(self) -> int:
        """Return the bytes of all tensors saved for backward."""
        return _saved_bytes(self._values, self._audit.slots)

    def profile(self, model: nn.Module, fullest: _Audited | _Traced) -> Profile:
        """Return the profile of this step. `fullest` is the step that saved the most bytes, which is noted if it is
        another one.
        """
        peak_bytes, step_ms = self.plain or (None, 0.0)
        notes = [NOT_RUN] if peak_bytes is None else []
        if fullest.saved_bytes() > self.saved_bytes():
            is_larger = fullest.extent() > self.extent() and fullest.fingerprint != self.fingerprint
            kind = "larger batch" if is_larger else "batch of which more is saved"
            notes.append(f"a {kind} came, {fullest.fingerprint.batch}, but not often enough to be rehearsed")
        static = self._watch.seen_static
        values, slots, calls = copy.deepcopy((self._values, self._audit.slots, self._calls))  # larger steps may follow
        step = TracedStep(
            values=values,
            slots=slots,
            calls=calls,
            kept=self._trace.kept,
            replayed=self._decisions.replay,
            stream=self._watch.recorder.stream,
            entry=self._watch.recorder.entry_addresses,
            given=self._trace.inputs,
            written_over=self._audit.written_over if self._is_alike else [],
            allows_in_place=self._audit.allows_in_place,
            implementations=self._audit.implementations,
        )
        return assemble(
            step,
            fingerprint=self.fingerprint,
            static=static,
            plain=(peak_bytes, step_ms),
            offload_bytes_per_ms=host_bandwidth(place_of(model)),
            notes=(
                *nondeterminism_notes(model, place_of(model)),
                *by_contents(self._audit),
                *in_words(model, static),
                *notes,
            ),
        )


def _saved_bytes(values: list[ValueDraft], slots: list[SlotDraft]) -> int:
    """Return the bytes of all tensors saved for backward."""
    return sum(values[index].bytes for index in {slot.value for slot in slots})


def _form(fingerprint: Fingerprint) -> str:
    """Describe the batch without its sizes: `[_, _] int64`."""
    return re.sub(r"\[.*?\]", lambda shape: re.sub(r"\d+", "_", shape[0]), fingerprint.batch)


def _size(fingerprint: Fingerprint) -> int:
    """Return the number of elements of the batch."""
    return elements(shapes_in(fingerprint.batch))


def _n_elements(inputs: list[list[str]]) -> int:
    return sum(elements(shapes_in(words)) for call in inputs for words in call)


def _in_words(inputs: list[list[str]]) -> str:
    """Describe the model's inputs, with equal calls counted together."""
    times = Counter(", ".join(call) for call in inputs)
    kinds = [words if n == 1 else f"{n} times {words}" for words, n in times.items()]
    return " and ".join(kinds if len(kinds) < 4 else [*kinds[:3], f"{len(kinds) - 3} others"])


class _OwnAudit(Audit):
    """An audit that raises before the update if it has changed the step, and that ends with the step."""

    is_over = False
    """True once the step has ended; hooks are removed later, and the model may be called until then."""

    def begin(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return interceptor.inner(*args, **kwargs) if self.is_over else super().begin(interceptor, args, kwargs)

    def try_all(self, call: CallDraft, frame: ReplayFrame, returned: Any) -> str | None:
        refused = super().try_all(call, frame, returned)
        if self.leaked is not None:
            raise RehearsalError(
                f"{self.leaked} writes tensors to something outside it, such as a dict, and has now done so twice, "
                "because it was replayed on trial.\n  "
                "Return them, or store them in attributes of the module, or use lowtide.fit, which rehearses a step "
                "before training begins."
            )
        return refused


class _StepRecorder:
    """Recording of one step, with the engine on the model. The recording ends with the step, and `leave` removes the
    engine.
    """

    recorder: Recorder
    audit: _OwnAudit | None = None
    known: _Audited | None = None
    """Audited step from which the decisions that free the most memory come."""
    engine: MaxSavingEngine | None = None
    trace: Trace | None = None
    n_with_new_buckets = 0

    def __init__(self, size: Fingerprint, static: Static, addresses: frozenset[int], place: torch.device) -> None:
        self.size = size
        self._static, self._addresses, self._place = static, addresses, place
        self.open, self.leave = contextlib.ExitStack(), contextlib.ExitStack()
        self.runs = True

    def start(self) -> None:
        """Start recording, then the clock: the recorder first collects garbage and looks for tensors."""
        self.recorder = self.open.enter_context(recorder_for(self._place))
        self._began = now_ms(self._place)

    @property
    def seen_static(self) -> Static:
        """Static memory as it was when the step began."""
        return with_others(self._static, self._addresses, self.recorder)

    def mark(self, label: str, data: object) -> None:
        """Add a mark to the recording, unless the step is over."""
        if self.runs:
            self.recorder.mark(label, data)

    def end(self) -> float:
        """End the recording and return the milliseconds since it started."""
        took_ms = now_ms(self._place) - self._began
        self.runs = False
        self.open.close()
        return took_ms
