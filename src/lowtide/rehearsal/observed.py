"""A rehearsal in steps that are really taken: of a training loop that can't be called as a function.

One step is audited and another one on a batch of its size traced, as `rehearse` does; only that nothing is run on trial
and nothing put back. Both leave the same bits as the plain step, so training goes on as if nobody had looked.

The audit is always a frugal one: who takes the steps can't take the first one again if it runs out of memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lowtide._clock import now_ms
from lowtide.errors import RehearsalError
from lowtide.identity import fingerprint, place_of, static_bytes
from lowtide.memory.events import Timeline
from lowtide.memory.measuring import recorder_for
from lowtide.rehearsal.audit import Audit
from lowtide.rehearsal.checks import SEVERAL_STREAMS, by_contents, check_one_device, doubts
from lowtide.rehearsal.left import with_left
from lowtide.rehearsal.link import bytes_per_ms
from lowtide.rehearsal.processes import check_sharding, n_with_new_buckets
from lowtide.rehearsal.profile import assemble
from lowtide.rehearsal.trace import MostSaving, Trace
from lowtide.remat.given import elements, shapes_in

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.memory.events import Recorder
    from lowtide.planner.records import Decisions, Fingerprint, Profile, Static
    from lowtide.rehearsal.drafts import CallDraft
    from lowtide.remat.replay import Frame

NOT_RUN = "no plain step was run: its peak is predicted"

PATIENCE = 20
"""Steps in which the largest size that there was may come again. After them the largest that did is good enough."""


class Observed:
    """Rehearses `model` while somebody else trains it: `profile` is there when enough steps were seen.

    Each step is reported with `begin(batch)` before its first forward and `end()` after the optimizer's update, and
    `leave()` takes everything out of the model. A batch of a size that is new is audited, and the next one of that size
    traced; with `plain` one more is run without any plan, for the true peak and time. The profile is of the largest
    size there was, or after PATIENCE steps of the largest that came often enough. `why` says what was wrong with steps
    that can't be used.
    """

    def __init__(self, model: nn.Module, *, plain: bool = False) -> None:
        self.model = model
        self.profile: Profile | None = None
        self.why: list[str] = []
        self.n_steps = 0
        """Steps that were seen to their end and could be used."""
        self._plain = plain
        self._watch: _Watch | None = None
        self._sizes: dict[Fingerprint, _Size] = {}

    @property
    def n_sizes(self) -> int:
        """How many sizes there were."""
        return len(self._sizes)

    def begin(self, batch: Any, optimizers: Iterable[Optimizer] = (), others: Iterable[nn.Module] = ()) -> None:
        """A step begins: the model is about to be called with `batch`. Gradients may be there or not.

        `others` are modules beside the model that are in memory meanwhile.
        """
        self.leave()
        if self.profile is not None:
            return
        check_one_device(self.model)
        check_sharding(self.model.modules())
        found, place = fingerprint(self.model, batch), place_of(self.model)
        if any(size.model != found.model for size in self._sizes):
            self._sizes.clear()  # other parameters are trained since
        static, addresses = static_bytes(self.model, batch, optimizers, others)
        known = self._sizes.get(found)
        self._watch = watch = _Watch(found, static, addresses, place)
        watch.n_with_new_buckets = n_with_new_buckets(self.model.modules())
        watch.start()
        if known is None:
            watch.audit = _OwnAudit(self.model, addresses, watch.mark, frugal=True)
            watch.leave.enter_context(watch.audit.running())
        elif not self._plain or known.traced is None or known.plain is not None:
            # Also where nothing is left to be found out: this takes the least memory.
            watch.engine = MostSaving(self.model, known.audit)
            watch.trace = Trace(watch.engine, watch.mark)
            watch.leave.enter_context(watch.trace.running())

    def end(self) -> None:
        """The step is over. May be called from a hook of the optimizer: it changes no hooks."""
        watch = self._watch
        if watch is None or not watch.runs:
            return
        took_ms = watch.end()
        try:
            if watch.audit is not None:
                self._sizes[watch.size] = _Size(watch.size, watch.audit, watch.recorder)
            elif watch.trace is not None:
                self._trace(watch, watch.trace)
            else:
                peak_bytes = watch.seen_static.total + Timeline(watch.recorder.stream).peak_bytes
                self._sizes[watch.size].plain = peak_bytes, took_ms
        except _Unusable as why:
            self.why.append(str(why))
            return
        self.n_steps += 1
        self._settle(may_wait=self.n_steps < PATIENCE)

    def _trace(self, watch: _Watch, trace: Trace) -> None:
        """A step was traced. Raises _Unusable, and lets go of the audit of that size unless it was of more."""
        size = self._sizes[watch.size]
        if trace.inputs != size.audit.inputs:
            if _n_elements(trace.inputs) > _n_elements(size.audit.inputs):
                del self._sizes[watch.size]
            raise _Unusable(
                f"it called the model with {_in_words(trace.inputs)}, and another step that began with the same batch "
                f"with {_in_words(size.audit.inputs)}"
            )
        if trace.packs != len(size.audit.slots):
            del self._sizes[watch.size]
            raise _Unusable(
                f"it saved {trace.packs} tensors, and another step on a batch of the same size, {watch.size.batch}, "
                f"saved {len(size.audit.slots)}"
            )
        if watch.n_with_new_buckets != n_with_new_buckets(self.model.modules()):
            raise _Unusable("DistributedDataParallel has put its buckets in another order in it")
        assert watch.engine is not None
        size.traced = watch, trace.kept, watch.engine.decisions

    def finish(self) -> None:
        """No step will come any more: the profile is of the largest size that came often enough, if any did."""
        if self.profile is None:
            self._settle(may_wait=False)

    def leave(self) -> None:
        """Take everything out of the model; a step that has not ended is given up. Not for hooks of the optimizer."""
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.end()
            watch.leave.close()

    def _settle(self, *, may_wait: bool) -> None:
        """The profile is of the largest size of which all is known, if there is none that is worth waiting for."""
        traced = [size for size in self._sizes.values() if size.traced is not None]
        known = [size for size in traced if size.plain is not None or not self._plain]
        best = max(known if may_wait else known or traced, key=_Size.extent, default=None)
        if best is None:
            return
        if not may_wait or best is max(self._sizes.values(), key=_Size.extent):
            self.profile = best.profile(self.model, max(self._sizes.values(), key=_Size.saved_bytes))


class _Unusable(Exception):
    """What was wrong with a step."""


class _Size:
    """What is known of the steps on batches of one size."""

    def __init__(self, fingerprint: Fingerprint, audit: Audit, recorder: Recorder) -> None:
        """Raises _Unusable and RehearsalError."""
        if len(audit.streams) > 1:
            raise RehearsalError(SEVERAL_STREAMS)
        if not audit.slots:
            raise _Unusable("the model saved nothing for backward")
        if not audit.reads:
            raise _Unusable("no backward ran through the model")
        audit.settle(recorder.stream)
        self.fingerprint, self.audit = fingerprint, audit
        self.traced: tuple[_Watch, set[int], Decisions] | None = None
        """The step, the slots that were kept in it, and what was decided about all others."""
        self.plain: tuple[int, float] | None = None
        """Peak in bytes and milliseconds of a step without any plan."""

    def extent(self) -> tuple[int, int]:
        """How large it is: by what the model was given. A first call that makes its state by itself is not larger."""
        return _n_elements(self.audit.inputs), self.saved_bytes()

    def saved_bytes(self) -> int:
        """Of all that is saved for backward."""
        return sum(self.audit.values[index].bytes for index in {slot.value for slot in self.audit.slots})

    def profile(self, model: nn.Module, largest: _Size) -> Profile:
        """The profile of its steps; once. `largest` is the size that saved most."""
        assert self.traced is not None
        watch, kept, decisions = self.traced
        peak_bytes, step_ms = self.plain or (None, 0.0)
        notes = [NOT_RUN] if peak_bytes is None else []
        if largest is not self:
            kind = "larger batch" if largest.extent() > self.extent() else "batch of which more is saved"
            notes.append(f"a {kind} came, {largest.fingerprint.batch}, but not often enough to be rehearsed")
        return assemble(
            values=self.audit.values,
            slots=self.audit.slots,
            calls=self.audit.calls,
            kept=kept,
            replayed=decisions.replay,
            stream=watch.recorder.stream,
            fingerprint=self.fingerprint,
            static=watch.seen_static,
            step_ms=step_ms,
            measured_plain_peak_bytes=peak_bytes,
            given=self.audit.inputs,
            written_over=self.audit.written_over,
            offload_bytes_per_ms=bytes_per_ms(place_of(model)),
            notes=(*doubts(model, place_of(model)), *by_contents(self.audit), *notes),
        )


def _n_elements(inputs: list[list[str]]) -> int:
    return sum(elements(shapes_in(words)) for call in inputs for words in call)


def _in_words(inputs: list[list[str]]) -> str:
    return " and ".join(", ".join(call) for call in inputs)


class _OwnAudit(Audit):
    """An audit that ends a step which it has changed, before there is an update."""

    def try_all(self, call: CallDraft, frame: Frame, returned: Any) -> str | None:
        refused = super().try_all(call, frame, returned)
        if self.leaked is not None:
            raise RehearsalError(
                f"{self.leaked} writes tensors to something outside of it, such as a dict, and has now done so twice: "
                "on trial it was run again.\n"
                "  Have them returned or put in attributes of the module, or use lowtide.fit, which rehearses a step "
                "before training begins."
            )
        return refused


class _Watch:
    """What is in force during one step: a recording, which ends with the step, and seams, which go out after it."""

    recorder: Recorder
    audit: Audit | None = None
    engine: MostSaving | None = None
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
        return with_left(self._static, self._addresses, self.recorder)

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
