"""A rehearsal in steps that are really taken: of a training loop that can't be called as a function.

One step is audited and the next one traced, as `rehearse` does; only that nothing is run on trial and nothing put back.
Both leave the same bits as the plain step, so training goes on as if nobody had looked.

The audit is always a frugal one: who takes the steps can't take the first one again if it runs out of memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from lowtide._clock import now_ms
from lowtide.errors import RehearsalError
from lowtide.identity import fingerprint, place_of, static_bytes
from lowtide.memory.events import Timeline
from lowtide.memory.measuring import recorder_for
from lowtide.rehearsal.addresses import nodes_at
from lowtide.rehearsal.audit import Audit
from lowtide.rehearsal.checks import SEVERAL_STREAMS, check_one_device, check_one_process, check_uncompiled, doubts
from lowtide.rehearsal.left import with_left
from lowtide.rehearsal.link import bytes_per_ms
from lowtide.rehearsal.profile import assemble
from lowtide.rehearsal.trace import SilentEngine, Trace, most_saving
from lowtide.remat.engine import actions_for

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from lowtide.memory.events import Recorder
    from lowtide.planner.records import Decisions, Fingerprint, Profile, Static
    from lowtide.remat.values import Handle

Kind = Literal["audit", "trace", "plain"]

NOT_RUN = "no plain step was run: its peak is predicted"


class Observed:
    """Rehearses `model` while somebody else trains it: `profile` is there when enough steps were seen.

    Each step is reported with `begin(batch)` before its first forward and `end()` after the optimizer's update, and
    `leave()` takes everything out of the model. Steps that can't be used, as those of another size than the audited
    one, are passed over, and `why` says for each what was wrong with it. With `plain` one more step is run without any
    plan, for its true peak and time.
    """

    def __init__(self, model: nn.Module, *, plain: bool = False) -> None:
        self.model = model
        self.profile: Profile | None = None
        self.why: list[str] = []
        self._plain = plain
        self._watch: _Watch | None = None
        self._audit: Audit | None = None
        self._audited: Fingerprint | None = None
        self._traced: tuple[_Watch, Decisions, Trace] | None = None

    def begin(self, batch: Any, optimizers: Iterable[Optimizer] = ()) -> None:
        """A step begins: the model is about to be called with `batch`. Gradients may be there or not."""
        self.leave()
        if self.profile is not None:
            return
        found = fingerprint(self.model, batch)
        if self._audited is not None and found != self._audited:
            self.why.append(f"it has another batch than the step before: {found.batch} after {self._audited.batch}")
            self._audit = self._audited = self._traced = None
        check_one_device(self.model)
        check_one_process(self.model.modules(), on_trial=False)
        check_uncompiled(self.model, wrapped=False)
        place = place_of(self.model)
        static, addresses = static_bytes(self.model, batch, optimizers)
        kind: Kind = "audit" if self._audit is None else "plain" if self._traced else "trace"
        self._watch = watch = _Watch(kind, static, addresses, place)
        watch.recorder = watch.open.enter_context(recorder_for(place))
        if watch.kind == "audit":
            self._audited = found
            self._audit = Audit(self.model, addresses, watch.mark, frugal=True)
            watch.leave.enter_context(self._audit.running())
        elif watch.kind == "trace":
            assert self._audit is not None
            audit = self._audit
            nodes = nodes_at(audit.values, audit.slots)
            decisions = most_saving(audit.values, audit.slots, audit.calls)
            engine = SilentEngine(self.model, actions_for({a: nodes[a] for a in decisions.remake}, decisions.replay))
            trace = _OwnTrace(engine, watch.mark)
            self._traced = watch, decisions, trace
            watch.leave.enter_context(trace.running())

    def end(self) -> None:
        """The step is over. May be called from a hook of the optimizer: it changes no hooks."""
        watch = self._watch
        if watch is None or not watch.runs:
            return
        took_ms = watch.end()
        if watch.kind == "audit":
            self._end_audit(watch)
        elif watch.kind == "trace":
            self._end_trace()
        else:
            peak_bytes = watch.seen_static.total + Timeline(watch.recorder.stream).peak_bytes
            self.profile = self._assemble(peak_bytes, took_ms)

    def leave(self) -> None:
        """Take everything out of the model; a step that has not ended is given up. Not for hooks of the optimizer."""
        if self._watch is not None:
            watch, self._watch = self._watch, None
            if watch.runs:
                watch.end()
                self._audit = self._audited = self._traced = None
            watch.leave.close()

    def _end_audit(self, watch: _Watch) -> None:
        audit = self._audit
        assert audit is not None
        if len(audit.streams) > 1:
            raise RehearsalError(SEVERAL_STREAMS)
        if audit.slots and audit.reads:
            audit.settle(watch.recorder.stream)
            return
        found = "no backward ran through the model" if audit.slots else "the model saved nothing for backward"
        self.why.append(found)
        self._audit = self._audited = None

    def _end_trace(self) -> None:
        assert self._audit is not None
        assert self._traced is not None
        trace = self._traced[2]
        if trace.packs != len(self._audit.slots):
            self.why.append(f"it saved {trace.packs} tensors, the step before it {len(self._audit.slots)}")
            self._audit = self._audited = self._traced = None
        elif not self._plain:
            self.profile = self._assemble(None, 0.0)

    def _assemble(self, plain_peak_bytes: int | None, step_ms: float) -> Profile:
        assert self._audit is not None
        assert self._audited is not None
        assert self._traced is not None
        audit = self._audit
        watch, decisions, trace = self._traced
        return assemble(
            values=audit.values,
            slots=audit.slots,
            calls=audit.calls,
            kept=trace.kept,
            replayed=decisions.replay,
            stream=watch.recorder.stream,
            fingerprint=self._audited,
            static=watch.seen_static,
            step_ms=step_ms,
            measured_plain_peak_bytes=plain_peak_bytes,
            given=audit.inputs,
            offload_bytes_per_ms=bytes_per_ms(place_of(self.model)),
            notes=(*doubts(self.model, place_of(self.model)), *([NOT_RUN] if plain_peak_bytes is None else [])),
        )


class _OwnTrace(Trace):
    """A trace that passes over what was saved in an earlier step and is read in this one, as by two models in turn."""

    def reading(self, handle: Handle) -> None:
        if handle in self._slots:
            super().reading(handle)

    def given(self, handle: Handle, tensor: Tensor) -> None:
        if handle in self._slots:
            super().given(handle, tensor)


class _Watch:
    """What is in force during one step: a recording, which ends with the step, and seams, which go out after it."""

    recorder: Recorder

    def __init__(self, kind: Kind, static: Static, addresses: frozenset[int], place: torch.device) -> None:
        self.kind = kind
        self._static, self._addresses, self._place = static, addresses, place
        self.open, self.leave = contextlib.ExitStack(), contextlib.ExitStack()
        self.runs = True
        self._began = now_ms(place)

    @property
    def seen_static(self) -> Static:
        """What was there when the step began."""
        return with_left(self._static, self._addresses, self.recorder)

    def mark(self, label: str, data: object) -> None:
        """A mark in the recording; what happens after the step is not marked."""
        if self.runs:
            self.recorder.mark(label, data)

    def end(self) -> float:
        """End the recording. Gives the milliseconds since the step began."""
        took_ms = now_ms(self._place) - self._began
        self.runs = False
        self.open.close()
        return took_ms
