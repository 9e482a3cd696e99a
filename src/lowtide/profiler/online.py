"""A rehearsal in steps that are really taken: of a training loop that can't be called as a function.

One step is audited and another one traced, as `rehearse` does; only that nothing is run on trial and nothing put back.
Both leave the same bits as the plain step, so training goes on as if nobody had looked. They may be on batches of two
sizes: then what was audited is taken to grow with what the trace saw (`rescale.py`).

The audit is always a frugal one: who takes the steps can't take the first one again if it runs out of memory.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lowtide._torch.device_timing import now_ms
from lowtide.errors import RehearsalError
from lowtide.memory.measure import recorder_for
from lowtide.memory.memory_timeline import Timeline
from lowtide.profiler.assemble import TracedStep, assemble
from lowtide.profiler.audit import Audit
from lowtide.profiler.checkpointed_blocks import without_checkpoints
from lowtide.profiler.differing_modules import modules_that_differ
from lowtide.profiler.host_bandwidth import host_bandwidth
from lowtide.profiler.other_memory import in_words, with_others
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
from lowtide.runtime.fingerprint import fingerprint, optimizers_of, place_of, static_bytes
from lowtide.state.process_group import check_sharding, n_with_new_buckets

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.memory.events import Recorder
    from lowtide.planner.records import Fingerprint, Profile, Static
    from lowtide.profiler.drafts import CallDraft, SlotDraft, ValueDraft
    from lowtide.runtime.replay import ReplayFrame

NOT_RUN = "no plain step was run: its peak is predicted"

PATIENCE = 20
"""Steps in which the largest size that there was may come again. After them the largest so far is good enough."""

GROWN = 2
"""How many times as large as an audited batch one may be without being audited itself."""


class OnlineProfiler:
    """Rehearses `model` while somebody else trains it: `profile` is there when enough steps were seen.

    Each step is reported with `begin(batch)` before its first forward and `end()` after the optimizer's update, and
    `leave()` takes everything out of the model. The first batch is audited, as is each of a new form or that is much
    larger, and all others are traced; with `plain` one more is run without any plan, for the true peak and time. The
    profile is of the largest size there was when that came twice, and after PATIENCE steps of the largest that was
    traced. `why` says what was wrong with steps that can't be used.
    """

    def __init__(
        self, model: nn.Module, *, plain: bool = False, in_place: bool = True, checkpoints: bool = True
    ) -> None:
        """Unless `checkpoints`, what checkpoints itself in these steps does not."""
        self.model = model
        self._in_place = in_place
        self._checkpoints = checkpoints
        self.checkpointed: Counter[str] = Counter()
        """By the path of the module that it is in, how many calls were given to torch.utils.checkpoint."""
        self.profile: Profile | None = None
        self.why: list[str] = []
        self.n_steps = 0
        """Steps that were seen to their end and could be used."""
        self._plain = plain
        self._patience = PATIENCE
        """Steps in which the largest size is waited for."""
        self._watch: _StepRecorder | None = None
        self._audited: dict[str, _Audited] = {}
        """By the form of the batch."""
        self._best: _Traced | None = None
        """The largest step that was traced."""
        self._largest: _Audited | _Traced | None = None
        """The largest step of all."""
        self._fullest: _Audited | _Traced | None = None
        """The one that saved most."""
        self._seen: Counter[Fingerprint] = Counter()
        self._left_alone: frozenset[str] = frozenset()
        """Paths of modules that save something else in each step."""
        self._to_come: Update | None = None
        """An update by optimizers of the model that have not stepped in the steps so far."""

    @property
    def n_sizes(self) -> int:
        """How many sizes there were."""
        return len(self._seen)

    def begin(self, batch: Any, optimizers: Iterable[Optimizer] = ()) -> None:
        """A step begins: the model is about to be called with `batch`. Gradients may be there or not."""
        self.leave()
        if self.profile is not None:
            return
        check_one_device(self.model)
        check_sharding(self.model.modules())
        found, place = fingerprint(self.model, batch), place_of(self.model)
        if any(size.model != found.model for size in self._seen):
            self._forget()  # others are trained since
        optimizers = tuple(optimizers)
        if self._audited:
            waiting = [o for o in optimizers_of(self.model) if all(o is not known for known in optimizers)]
            self._to_come = Update.tried(self.model, waiting) if waiting else None
        static, addresses = static_bytes(self.model, batch, optimizers)
        known, best = self._audited.get(_form(found)), self._best
        watch = _StepRecorder(found, static, addresses, place)
        watch.n_with_new_buckets = n_with_new_buckets(self.model.modules())
        watch.start()
        self._watch = watch  # not before: what can't be recorded has no end
        if not self._checkpoints:
            watch.leave.enter_context(without_checkpoints())
        if known is None or _size(found) > GROWN * _size(known.fingerprint):
            watch.audit = _OwnAudit(self.model, addresses, watch.mark, frugal=True, in_place=self._in_place)
            watch.audit.excluded_modules = self._left_alone
            watch.leave.enter_context(watch.audit.running())
        elif not self._plain or best is None or best.fingerprint != found or best.plain is not None:
            # Also where nothing is left to be found out: this takes the least memory.
            engine = MaxSavingEngine(self.model, known.audit, in_place=known.fingerprint == found)
            engine.excluded_modules = self._left_alone
            watch.known, watch.engine, watch.trace = known, engine, Trace(engine, watch.mark)
            watch.leave.enter_context(watch.trace.running())

    def end(self) -> None:
        """The step is over. May be called from a hook of the optimizer: it changes no hooks."""
        watch = self._watch
        if watch is None or not watch.runs:
            return
        took_ms = watch.end()
        try:
            if watch.audit is not None:
                self._audited[_form(watch.size)] = found = _Audited(watch.size, watch.audit, watch.recorder)
                self._compare(found)
                self.checkpointed = watch.audit.checkpointed
            elif watch.known is not None and watch.trace is not None:
                self._trace(watch, watch.known, watch.trace)
            elif self._best is not None:
                peak_bytes = watch.seen_static.total + Timeline(watch.recorder.stream).peak_bytes
                self._best.plain = peak_bytes, took_ms
        except _Unusable as why:
            self.why.append(str(why))
            return
        self._seen[watch.size] += 1
        self.n_steps += 1
        self._settle(may_wait=self.n_steps < self._patience)

    def _trace(self, watch: _StepRecorder, known: _Audited, trace: Trace) -> None:
        """A step was traced. Raises _Unusable, and lets go of its audit if another one is needed for such steps."""
        audit, is_alike = known.audit, watch.size == known.fingerprint
        if trace.inputs != audit.inputs and (is_alike or len(trace.inputs) != len(audit.inputs)):
            if _n_elements(trace.inputs) > _n_elements(audit.inputs):
                del self._audited[_form(watch.size)]
            raise _Unusable(
                f"it called the model with {_in_words(trace.inputs)}, and another step that began with "
                f"{'the same' if is_alike else 'such a'} batch with {_in_words(audit.inputs)}"
            )
        if found := modules_that_differ(audit.shapes, trace.calls):
            del self._audited[_form(watch.size)]
            if "" not in found:
                self._leave_alone(found)
            raise _Unusable(
                f"it saved {trace.packs} tensors in {len(trace.calls)} calls, and another step on a batch of "
                f"{'the same size' if is_alike else 'such a form'}, {known.fingerprint.batch}, saved "
                f"{len(audit.slots)} in {len(audit.calls)}"
            )
        if watch.n_with_new_buckets != n_with_new_buckets(self.model.modules()):
            raise _Unusable("DistributedDataParallel has put its buckets in another order in it")
        traced = _Traced(watch, known, trace)
        if self._best is None or traced.extent() > self._best.extent():
            self._best = traced
        self._compare(traced)

    def _leave_alone(self, paths: frozenset[str]) -> None:
        """Begin anew, without these modules."""
        self._left_alone |= paths
        self._forget()

    def _forget(self) -> None:
        self._audited, self._best, self._largest, self._fullest = {}, None, None, None
        self._seen.clear()

    def _compare(self, found: _Audited | _Traced) -> None:
        if self._largest is None or found.extent() > self._largest.extent():
            self._largest = found
        if self._fullest is None or found.saved_bytes() > self._fullest.saved_bytes():
            self._fullest = found

    def finish(self) -> None:
        """No step will come any more: the profile is of the largest that was traced, if any was."""
        if self.profile is None:
            self._settle(may_wait=False)

    def begin_anew(self) -> None:
        """Rehearse larger batches: a step is enough that is traced, as is one of a size that the audits are good for.

        Of the earlier steps nothing is held but the audits.
        """
        self.profile, self._best, self._largest, self._fullest = None, None, None, None
        self._seen.clear()
        self._patience = 0

    def give_up(self) -> None:
        """Record no longer. For hooks of the optimizer, too; `leave` is still to be called."""
        if self._watch is not None:
            self._watch.end()

    def leave(self) -> None:
        """Take everything out of the model; a step that has not ended is given up. Not for hooks of the optimizer."""
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.end()
            watch.leave.close()

    def _settle(self, *, may_wait: bool) -> None:
        """The profile is of the largest step that was traced, if nothing is worth waiting for."""
        best, largest, fullest = self._best, self._largest, self._fullest
        if best is None or largest is None or fullest is None:
            return
        is_largest = best.extent() >= largest.extent() and self._seen[best.fingerprint] > 1
        if not may_wait or (is_largest and (best.plain is not None or not self._plain)):
            found, alone = best.profile(self.model, fullest), tuple(sorted(self._left_alone))
            if self._to_come is not None:
                found = replace(self._to_come.counted(found), notes=(*found.notes, *self._to_come.notes()))
            notes = [f"left alone, as it saves something else in each step: {', '.join(alone)}"] if alone else []
            self.profile = replace(found, excluded_modules=alone, notes=(*found.notes, *notes))


class _Unusable(Exception):
    """What was wrong with a step."""


class _Audited:
    """A step that was audited."""

    def __init__(self, fingerprint: Fingerprint, audit: Audit, recorder: Recorder) -> None:
        """Raises _Unusable and RehearsalError."""
        if len(audit.streams) > 1:
            raise RehearsalError(SEVERAL_STREAMS)
        check_saved(audit.model, audit)
        if not audit.slots:
            raise _Unusable("the model saved nothing for backward")
        if not audit.reads:
            raise _Unusable("no backward ran through the model")
        audit.settle(recorder.stream)
        self.fingerprint, self.audit = fingerprint, audit

    def extent(self) -> tuple[int, int]:
        """How large it is: by what the model was given. A first call that makes its state by itself is not larger."""
        return _n_elements(self.audit.inputs), self.saved_bytes()

    def saved_bytes(self) -> int:
        """Of all that is saved for backward."""
        return _saved_bytes(self.audit.values, self.audit.slots)


class _Traced:
    """A step that was traced, under the most saving decisions that an audit of it or of a step like it led to."""

    def __init__(self, watch: _StepRecorder, audited: _Audited, trace: Trace) -> None:
        self.fingerprint = watch.size
        self.plain: tuple[int, float] | None = None
        """Peak in bytes and milliseconds of such a step without any plan."""
        assert watch.engine is not None
        self._watch, self._trace, self._decisions = watch, trace, watch.engine.decisions
        self._audit = audit = audited.audit
        self._is_alike = watch.size == audited.fingerprint
        self._values, self._calls = audit.values, audit.calls
        if not self._is_alike:
            self._values, self._calls = resized(
                audit.values, audit.slots, audit.calls, audited=audit.elements, found=trace.elements
            )

    def extent(self) -> tuple[int, int]:
        """How large it is, as that of an audited step."""
        return _n_elements(self._trace.inputs), self.saved_bytes()

    def saved_bytes(self) -> int:
        """Of all that is saved for backward."""
        return _saved_bytes(self._values, self._audit.slots)

    def profile(self, model: nn.Module, fullest: _Audited | _Traced) -> Profile:
        """The profile of such steps; once. `fullest` is the step that saved most."""
        peak_bytes, step_ms = self.plain or (None, 0.0)
        notes = [NOT_RUN] if peak_bytes is None else []
        if fullest.saved_bytes() > self.saved_bytes():
            kind = "larger batch" if fullest.extent() > self.extent() else "batch of which more is saved"
            notes.append(f"a {kind} came, {fullest.fingerprint.batch}, but not often enough to be rehearsed")
        static = self._watch.seen_static
        values, slots, calls = copy.deepcopy((self._values, self._audit.slots, self._calls))  # larger ones may follow
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
    """Of all that is saved for backward."""
    return sum(values[index].bytes for index in {slot.value for slot in slots})


def _form(found: Fingerprint) -> str:
    """A batch in words but for its sizes: `[_, _] int64`."""
    return re.sub(r"\[.*?\]", lambda shape: re.sub(r"\d+", "_", shape[0]), found.batch)


def _size(found: Fingerprint) -> int:
    """The elements of a batch."""
    return elements(shapes_in(found.batch))


def _n_elements(inputs: list[list[str]]) -> int:
    return sum(elements(shapes_in(words)) for call in inputs for words in call)


def _in_words(inputs: list[list[str]]) -> str:
    """What the model was called with, calls that are alike once."""
    times = Counter(", ".join(call) for call in inputs)
    kinds = [words if n == 1 else f"{n} times {words}" for words, n in times.items()]
    return " and ".join(kinds if len(kinds) < 4 else [*kinds[:3], f"{len(kinds) - 3} others"])


class _OwnAudit(Audit):
    """An audit that ends a step which it has changed, before there is an update."""

    def try_all(self, call: CallDraft, frame: ReplayFrame, returned: Any) -> str | None:
        refused = super().try_all(call, frame, returned)
        if self.leaked is not None:
            raise RehearsalError(
                f"{self.leaked} writes tensors to something outside of it, such as a dict, and has now done so twice: "
                "on trial it was run again.\n"
                "  Have them returned or put in attributes of the module, or use lowtide.fit, which rehearses a step "
                "before training begins."
            )
        return refused


class _StepRecorder:
    """What is in force during one step: a recording, which ends with the step, and seams, which go out after it."""

    recorder: Recorder
    audit: Audit | None = None
    known: _Audited | None = None
    """The audited step that the most saving decisions of this one are of."""
    engine: MaxSavingEngine | None = None
    trace: Trace | None = None
    n_with_new_buckets = 0

    def __init__(self, size: Fingerprint, static: Static, addresses: frozenset[int], place: torch.device) -> None:
        self.size = size
        self._static, self._addresses, self._place = static, addresses, place
        self.open, self.leave = contextlib.ExitStack(), contextlib.ExitStack()
        self.runs = True

    def start(self) -> None:
        """Start recording, and then the clock: the recorder collects garbage and looks for tensors first."""
        self.recorder = self.open.enter_context(recorder_for(self._place))
        self._began = now_ms(self._place)

    @property
    def seen_static(self) -> Static:
        """What was there when the step began."""
        return with_others(self._static, self._addresses, self.recorder)

    def mark(self, label: str, data: object) -> None:
        """A mark in the recording; what happens after the step is not marked."""
        if self.runs:
            self.recorder.mark(label, data)

    def end(self) -> float:
        """End the recording. Gives the milliseconds since it started."""
        took_ms = now_ms(self._place) - self._began
        self.runs = False
        self.open.close()
        return took_ms
