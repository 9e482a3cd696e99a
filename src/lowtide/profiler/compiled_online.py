"""Rehearsal of compiled code during real training steps, for a training loop that can't be called as a function.

The loop runs under a partitioner that chooses like torch's own and collects the joint graphs. Every step is recorded.
The profile is made from the step with the largest batch so far, preferably one in which nothing was compiled. A graph
with symbolic sizes is evaluated at the sizes of that step. Training results are bit-identical to those of the plain
compiled step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from lowtide._torch.compiled_code import n_compiled
from lowtide._torch.device_timing import now_ms
from lowtide._torch.inductor import (
    always_partitioned,
    is_addmm_unfused,
    partition_by,
    watched_calls,
    watched_products,
)
from lowtide.memory.events import EventStream
from lowtide.memory.measure import make_recorder
from lowtide.memory.memory_timeline import Timeline
from lowtide.profiler.checkpointed_blocks import CheckpointedCalls
from lowtide.profiler.compiled_profile import CALL, assembled, compute_peak_with_calls, count_held_after_calls
from lowtide.profiler.compiled_steps import note_partly_compiled, noted_calls
from lowtide.profiler.joint_memory import PRODUCT
from lowtide.profiler.online import PATIENCE
from lowtide.profiler.other_memory import put_in_words, with_others
from lowtide.profiler.preconditions import check_compiled
from lowtide.profiler.trial_updates import Update
from lowtide.runtime.call_shapes import elements, parse_shapes
from lowtide.runtime.compiled_plan import PlanPartitioner
from lowtide.runtime.fingerprint import find_device, fingerprint
from lowtide.runtime.static_memory import static_bytes

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.memory.events import Recorder
    from lowtide.planner.records import Fingerprint, Profile, Static
    from lowtide.runtime.joint_slots import JointSlots

COMPILED_IN_STEP: Final = "the rehearsed step compiled code, whose memory may count"


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recorded training step: its events, memory and time."""

    size: Fingerprint
    stream: EventStream
    static: Static
    ms: float
    inputs: tuple[str, ...]
    is_clean: bool
    """True if nothing was compiled in the step."""

    @property
    def rank(self) -> tuple[int, bool]:
        """Sort key of recorded steps: elements of the batch, then True if nothing was compiled. The largest is planned
        for.
        """
        return elements(parse_shapes(self.size.batch)), self.is_clean


@dataclass(slots=True, kw_only=True)
class _RunningStep:
    """A training step that is being recorded, with the state of the profiler's counters before the step."""

    recording: contextlib.ExitStack
    recorder: Recorder
    size: Fingerprint
    static: Static
    addresses: frozenset[int]
    """Addresses of the static memory."""
    n_compiled: int
    """Number of compilations before the step."""
    n_inputs: int
    """Number of calls before the step."""
    began_ms: float = 0.0


class OnlineCompiledProfiler:
    """Profiler of compiled code that trains `model`, with the interface of `OnlineProfiler`."""

    def __init__(self, model: nn.Module) -> None:
        # weak: a plan in force keeps its rehearsals alive, and must not keep the model alive
        self._model = weakref.ref(model)
        self.profile: Profile | None = None
        self.checkpointed = CheckpointedCalls()
        """Always empty: checkpoints in compiled code are part of its graphs."""
        self.why: list[str] = []
        self.other_kind: str | None = None
        """Always None: steps of several kinds are compiled again, and not compared."""
        self.n_steps = 0
        """Number of complete steps."""
        self._graphs: list[JointSlots] = []
        self._steps_of: Counter[Fingerprint] = Counter()
        self._best: _Recorded | None = None
        """Recorded step to plan for: the largest; steps in which nothing was compiled are preferred."""
        self._patience = PATIENCE
        self._to_come: Update | None = None
        self._stack = contextlib.ExitStack()
        """Partitioner and patches, in force from the first step on."""
        self._is_on = False
        self._running: _RunningStep | None = None

    @property
    def model(self) -> nn.Module:
        """The trained model, which must be alive."""
        model = self._model()
        assert model is not None
        return model

    @property
    def n_sizes(self) -> int:
        """Number of batch sizes so far."""
        return len(self._steps_of)

    def begin(self, batch: Any, optimizers: Iterable[Optimizer] = ()) -> None:
        """Begin a step, before the compiled code is called with `batch`."""
        self.give_up()
        if self.profile is not None:
            return
        if not self._is_on:
            self._put_on()
        optimizers = tuple(optimizers)
        if self._steps_of:
            self._to_come = Update.tried(self.model, optimizers)
        size, place = fingerprint(self.model, batch), find_device(self.model)
        static, addresses = static_bytes(self.model, batch, optimizers)
        n_before, recording = n_compiled(), contextlib.ExitStack()
        self._running = running = _RunningStep(
            recording=recording,
            recorder=recording.enter_context(make_recorder(place)),
            size=size,
            static=static,
            addresses=addresses,
            n_compiled=n_before,
            n_inputs=len(self._inputs),
        )
        running.began_ms = now_ms(place)

    def _put_on(self) -> None:
        check_compiled(self.model)
        partitioner = PlanPartitioner(unfused=is_addmm_unfused())
        partitioner.on_compile = self._graphs.append
        with contextlib.ExitStack() as stack:
            stack.callback(partition_by(partitioner))
            stack.enter_context(always_partitioned())
            stack.enter_context(watched_calls(lambda *data: self._mark(CALL, data)))
            stack.enter_context(watched_products(lambda operands: self._mark(PRODUCT, operands)))
            self._inputs = stack.enter_context(noted_calls(self.model))
            self._stack, self._is_on = stack.pop_all(), True

    def _mark(self, label: str, data: object) -> None:
        if self._running is not None:
            self._running.recorder.mark(label, data)

    def end(self) -> None:
        """End the recording of the step, and make the profile if enough steps were recorded.

        Hooks of the optimizer may call this method, because it changes no hooks. Raises RehearsalError if the step
        can't be planned.
        """
        if self._running is None:
            return
        running, self._running = self._running, None
        took_ms = now_ms(find_device(self.model)) - running.began_ms
        running.recording.close()
        self.n_steps += 1
        self._steps_of[running.size] += 1
        recorded = _Recorded(
            size=running.size,
            stream=running.recorder.stream,
            static=with_others(running.static, running.addresses, running.recorder),
            ms=took_ms,
            inputs=tuple(dict.fromkeys(self._inputs[running.n_inputs :])),
            is_clean=n_compiled() == running.n_compiled,
        )
        if not self._graphs:
            assembled((), recorded.stream, 0.0)  # raises RehearsalError
        if self._best is None or recorded.rank > self._best.rank:
            self._best = recorded
        self._set_profile(may_wait=self.n_steps < self._patience)

    def finish(self) -> None:
        """Make the profile from the largest recorded step, if any, because no further steps will come."""
        if self.profile is None:
            self._set_profile(may_wait=False)

    def predict_peak_with(self, record: Callable[[Counter[int]], EventStream | None]) -> int | None:
        """Return the profiled step's peak in bytes, if its compiled calls allocated the memory that `record` finds.

        `record` takes the number of blocks of each size in bytes that the step holds after the calls, and returns a
        recording of the calls alone, or None. Without such a recording the result is None.
        """
        if self._best is None or (calls := record(count_held_after_calls(self._best.stream))) is None:
            return None
        peak_bytes = compute_peak_with_calls(self._best.stream, calls)
        return None if peak_bytes is None else self._best.static.total + peak_bytes

    def restart(self) -> None:
        """Forget the recorded steps, so that a profile for larger batches can be made. The next step completes that
        profile.
        """
        self.profile, self._best, self._patience = None, None, 0
        self._steps_of.clear()

    def give_up(self) -> None:
        """Stop recording. Hooks of the optimizer may call this method; `leave` must still be called afterwards."""
        if self._running is not None:
            running, self._running = self._running, None
            running.recording.close()

    def leave(self) -> None:
        """Remove the partitioner. Must not be called from hooks of the optimizer."""
        self.give_up()
        if self._is_on:
            self._is_on = False
            self._graphs.clear()
            self._stack.close()

    def _set_profile(self, *, may_wait: bool) -> None:
        if self._best is not None and (self._best.is_clean or not may_wait):
            self.profile = self._profile(self._best)

    def _profile(self, step: _Recorded) -> Profile:
        measured = step.static.total + Timeline(step.stream).peak_bytes
        notes = [] if step.is_clean else [COMPILED_IN_STEP]
        profile = replace(
            assembled(self._graphs, step.stream, step.ms),
            fingerprint=step.size,
            static=step.static,
            measured_plain_peak_bytes=measured,
            input_shapes=step.inputs,
            notes=(*put_in_words(self.model, step.static), *note_partly_compiled(self.model), *notes),
        )
        return profile if self._to_come is None else self._to_come.counted(profile)
