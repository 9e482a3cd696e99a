"""A recorded step of a training loop: audited, or traced under the decisions that free the most memory."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from lowtide._torch.device_timing import now_ms
from lowtide.errors import RehearsalError
from lowtide.memory.measure import make_recorder
from lowtide.memory.memory_timeline import Timeline
from lowtide.profiler.assemble import TracedStep, assemble
from lowtide.profiler.audit import Audit
from lowtide.profiler.host_bandwidth import host_bandwidth
from lowtide.profiler.other_memory import NOTEWORTHY, put_in_words, with_others
from lowtide.profiler.pass_reads import PassReads, ReadSlots
from lowtide.profiler.preconditions import (
    SEVERAL_STREAMS,
    by_contents,
    check_saved,
    list_nondeterminism_notes,
)
from lowtide.profiler.rescale import resized
from lowtide.profiler.trace import MaxSavingEngine, Trace
from lowtide.runtime.call_shapes import elements, parse_shapes
from lowtide.runtime.fingerprint import find_device
from lowtide.units import format_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lowtide.memory.events import Recorder
    from lowtide.planner.records import Fingerprint, Profile, Static
    from lowtide.profiler.differing_modules import CallShape
    from lowtide.profiler.drafts import StepDrafts
    from lowtide.runtime.call_interceptor import CallInterceptor

NOT_RUN = "no plain step was run: its peak is predicted"


Calls: TypeAlias = tuple[tuple[str, int | None, int], ...]
"""Calls of modules, each with the call around it and the number of tensors that it saved."""


class Kind(NamedTuple):
    """Kind of a training step: the modules that it calls, and the saved tensors that its backward passes read."""

    calls: Calls
    reads: ReadSlots
    """Saved tensors that backward has read."""


def kind_of(calls: Iterable[CallShape], reads: PassReads) -> Kind:
    """Return the kind of a step with these module calls and reads."""
    return Kind(tuple((call.path, call.parent, call.n_saved) for call in calls), reads.slots())


class Unusable(Exception):
    """Signal that a recorded step can't be used for a profile; the text is the reason."""


class OtherKind(Unusable):
    """Signal that a step was of another kind than expected; the text is the difference."""


class RecordedStep:
    """A training step that was audited or traced: its batch, its inputs, and the tensors that it saved and read."""

    fingerprint: Fingerprint
    kind: Kind
    drafts: StepDrafts
    inputs: list[list[str]]
    """Shapes and dtypes of the tensor arguments of each call of the model from outside, as text."""

    @property
    def fullness(self) -> tuple[int, int]:
        """Return the bytes that the step saved, and the saved bytes that backward read, added up over its passes."""
        return self.drafts.saved_bytes, sum(self.drafts.sum_bytes_in(slots) for _, slots in self.kind.reads)

    def extent(self) -> tuple[int, int, int]:
        """Return a key that orders steps by size: elements of the inputs, then fullness.

        Saved bytes alone would mislead, because a first call that creates state saves more.
        """
        return n_elements(self.inputs), *self.fullness


class AuditedTrainingStep(RecordedStep):
    """An audited training step. Later steps are traced under decisions from this audit, and compared with this step."""

    def __init__(self, fingerprint: Fingerprint, audit: Audit, recorder: Recorder) -> None:
        """Complete the audit of a step that has ended.

        Raises Unusable if the step saved or read nothing, and RehearsalError if no step of the model can be used.
        """
        if len(audit.streams) > 1:
            raise RehearsalError(SEVERAL_STREAMS)
        check_saved(audit.model, audit)
        if not audit.step.slots:
            raise Unusable("the model saved nothing for backward")
        if not audit.reads:
            raise Unusable("no backward ran through the model")
        audit.complete_drafts(recorder.stream)
        self.fingerprint, self.audit, self.kind = fingerprint, audit, kind_of(audit.shapes, audit.reads)
        self.drafts, self.inputs = audit.step, audit.inputs


class TracedTrainingStep(RecordedStep):
    """A traced step, under the decisions that free the most memory, from an audit of this step or of a similar one."""

    def __init__(self, recording: StepRecorder, audited: AuditedTrainingStep, trace: Trace) -> None:
        self.fingerprint = recording.size
        self.plain: tuple[int, float] | None = None
        """Peak in bytes and time in milliseconds of such a step without any plan."""
        assert recording.engine is not None
        self._recording, self._trace, self._decisions = recording, trace, recording.engine.decisions
        self._audit = audited.audit
        self.kind, self.inputs = kind_of(trace.calls, trace.reads), trace.inputs
        self._is_alike = recording.size == audited.fingerprint
        self.drafts = audited.drafts if self._is_alike else resized(audited.drafts, trace.elements)

    def unread_notes(self) -> list[str]:
        """Return a note on saved tensors that no backward pass has read, unless they are few."""
        read = frozenset[int]().union(*(slots for _, slots in self.kind.reads))
        saved_bytes = self.drafts.saved_bytes
        unread_bytes = saved_bytes - self.drafts.sum_bytes_in(read)
        if unread_bytes < NOTEWORTHY * saved_bytes:
            return []
        unread = f"{format_bytes(unread_bytes)} of saved tensors, as those of an output without a loss"
        return [f"backward did not read {unread}: a later step that reads them may exceed the budget"]

    @property
    def is_sized_by_contents(self) -> bool:
        """Return True if the memory of some operators depends on the contents of tensors."""
        return bool(self._audit.by_contents)

    def lean_peak_bytes(self) -> int:
        """Return the traced step's peak in bytes, less optimizer state. The step ran under the decisions that free the
        most memory.
        """
        static = self._recording.seen_static
        return static.total - static.optimizer + Timeline(self._recording.recorder.stream).peak_bytes

    def profile(self, model: nn.Module, fullest: RecordedStep) -> Profile:
        """Return this step's profile, with a note if `fullest`, the step that saved and read most, exceeds it."""
        peak_bytes, step_ms = self.plain or (None, 0.0)
        notes = [NOT_RUN] if peak_bytes is None else []
        if fullest.drafts.saved_bytes > self.drafts.saved_bytes:
            is_larger = fullest.extent() > self.extent() and fullest.fingerprint != self.fingerprint
            kind = "larger batch" if is_larger else "batch that saves more"
            notes.append(f"a {kind} came, {fullest.fingerprint.batch}, but not often enough to be rehearsed")
        elif fullest.fullness > self.fullness:
            notes.append("a step whose backward reads more saved tensors came, but not often enough to be rehearsed")
        static = self._recording.seen_static
        step = TracedStep(
            drafts=self.drafts.copy(),  # larger steps may follow
            kept=self._trace.kept,
            replayed=self._decisions.replay,
            stream=self._recording.recorder.stream,
            entry=self._recording.recorder.entry_addresses,
            input_shapes=self.inputs,
            written_over=self._audit.written_over if self._is_alike else [],
            allows_in_place=self._audit.allows_in_place,
            implementations=self._audit.implementations,
        )
        return assemble(
            step,
            fingerprint=self.fingerprint,
            static=static,
            plain=(peak_bytes, step_ms),
            offload_bytes_per_ms=host_bandwidth(find_device(model)),
            notes=(
                *list_nondeterminism_notes(model, find_device(model)),
                *by_contents(self._audit),
                *put_in_words(model, static),
                *notes,
            ),
        )


def describe_form(fingerprint: Fingerprint) -> str:
    """Describe the batch in a fingerprint without its sizes: `[_, _] int64`."""
    return re.sub(r"\[.*?\]", lambda shape: re.sub(r"\d+", "_", shape[0]), fingerprint.batch)


def measure_size(fingerprint: Fingerprint) -> int:
    """Return the number of elements of the batch in a fingerprint."""
    return elements(parse_shapes(fingerprint.batch))


def n_elements(inputs: list[list[str]]) -> int:
    return sum(elements(parse_shapes(words)) for call in inputs for words in call)


def describe_inputs(inputs: list[list[str]]) -> str:
    """Describe the model's inputs, with equal calls counted together."""
    times = Counter(", ".join(call) for call in inputs)
    kinds = [words if n == 1 else f"{n} times {words}" for words, n in times.items()]
    return " and ".join(kinds if len(kinds) < 4 else [*kinds[:3], f"{len(kinds) - 3} others"])


class TrainingAudit(Audit):
    """An audit in a training loop, which raises RehearsalError before the update if a trial replay changed the step."""

    def on_exit(self, interceptor: CallInterceptor) -> None:
        super().on_exit(interceptor)
        if self.leaked is not None:
            raise RehearsalError(
                f"{self.leaked} writes tensors to something outside it, such as a dict, and has now done so twice, "
                "because it was replayed on trial.\n  "
                "Return them, or store them in attributes of the module, or use lowtide.fit, which rehearses a step "
                "before training begins."
            )


class StepRecorder:
    """Recording of one step, with an engine installed on the model. The recording ends with the step; the engine stays
    until `installed` is closed.
    """

    recorder: Recorder
    audit: TrainingAudit | None = None
    known: AuditedTrainingStep | None = None
    """Audited step from which the decisions that free the most memory come."""
    engine: MaxSavingEngine | None = None
    trace: Trace | None = None
    n_with_new_buckets = 0

    def __init__(self, size: Fingerprint, static: Static, addresses: frozenset[int], place: torch.device) -> None:
        self.size = size
        self._static, self._addresses, self._place = static, addresses, place
        self._open, self.installed = contextlib.ExitStack(), contextlib.ExitStack()
        self.is_running = True

    def start(self) -> None:
        """Start recording, then the clock: the recorder first collects garbage and looks for tensors."""
        self.recorder = self._open.enter_context(make_recorder(self._place))
        self._began = now_ms(self._place)

    @property
    def seen_static(self) -> Static:
        """Memory of all kinds, in bytes, that existed when the step began and that no plan changes."""
        return with_others(self._static, self._addresses, self.recorder)

    def mark(self, label: str, data: object) -> None:
        """Add a mark to the recording, unless the step is over."""
        if self.is_running:
            self.recorder.mark(label, data)

    def end(self) -> float:
        """End the recording and return the milliseconds since it started."""
        took_ms = now_ms(self._place) - self._began
        self.is_running = False
        self._open.close()
        return took_ms
