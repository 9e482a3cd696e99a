"""Rehearse the steps of a script."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from lowtide._torch.compiled_code import has_compiled_modules, is_compiled
from lowtide.errors import RehearsalError
from lowtide.levers import enable
from lowtide.levers.lever import LeverNotApplicable
from lowtide.memory.events import Busy
from lowtide.planner.records import AS_A_WHOLE
from lowtide.profiler.checkpointed_blocks import with_checkpoint_notes
from lowtide.profiler.online import DRAWN_LAYERS, PATIENCE, OnlineProfiler
from lowtide.profiler.preconditions import check_not_scripted, has_planned_blocks, has_torchscript
from lowtide.runtime.composite_model import CompositeModel, find_name
from lowtide.script.part_calls import PartCalls
from lowtide.script.step_listener import StepListener, StopScript
from lowtide.state.process_group import several_processes

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer

    from lowtide.levers import LeverStack
    from lowtide.memory.events import EventStream
    from lowtide.planner.records import AppliedLever, Profile
    from lowtide.profiler.compiled_online import OnlineCompiledProfiler
    from lowtide.profiler.training_step import Kind
    from lowtide.runtime.known_calls import KnownCalls

    TrialCall = tuple[Callable[..., Any], tuple[Any, Any]]
    """A function or module, and the arguments of one call of it."""

TWO_STEPS = f"was rehearsed: that takes two steps, and up to {PATIENCE} where batches are of several sizes"

TORCHSCRIPT_RUNS = 2
"""Number of steps after which TorchScript has optimized its forward and backward, so that all later steps save the same
tensors.
"""

MOST_UNUSABLE = 6
"""Number of unusable steps after which the rehearsal is given up."""

WHOLE_IN_PROCESSES: Final = (
    f"compiled code is {AS_A_WHOLE}, not planned inside, where several processes train together: what saves memory "
    "then is to compile the repeated blocks, each in place (`block.compile()`), not the model"
)

ONE_FORM = (
    "  Have the model do the same work in each step, or give a step of your own and the largest batch to "
    f"lowtide.rehearse or lowtide.fit. {DRAWN_LAYERS}."
)


class StepRehearser(StepListener):
    """A listener that rehearses the model, then ends the script unless `stop` is False."""

    @property
    def n_missing(self) -> int:
        n_needed = PATIENCE if self.n_sizes > 1 and not self._stop else 2
        return max(n_needed - (0 if self._observed is None else self._observed.n_steps), 1)

    @property
    def awaits(self) -> str:
        hidden = f"; the script itself recorded {self.n_hidden} of them, as with a profiler" if self.n_hidden else ""
        other = None if self._observed is None else self._observed.other_kind
        return TWO_STEPS + hidden + (f"; its steps did not do the same work: in one, {other}" if other else "")

    def __init__(
        self, *, plain: bool = False, stop: bool = True, levers: tuple[AppliedLever, ...] = (), in_place: bool = True
    ) -> None:
        self.done = False
        self.profile: Profile | None = None
        self._levers, self._in_place = levers, in_place
        self.inside_blocks = True
        """False if compiled blocks are to be replayed as a whole."""
        self._on: LeverStack | None = None
        self._notes: tuple[str, ...] = ()
        """Notes on compiled code that is not planned inside."""
        self.n_steps = 0
        """Number of steps that were observed to their end."""
        self.n_hidden = 0
        """Number of steps that could not be observed, because another recorder was active."""
        self._is_hidden = False
        self._plain, self._stop = plain, stop
        self._observed: OnlineProfiler | OnlineCompiledProfiler | None = None
        self._known_kinds: frozenset[Kind] = frozenset()
        """Kinds of steps that were rehearsed before the steps changed; a step of another kind is waited for."""
        self._n_runs = 0
        """Number of steps in which TorchScript in the model ran; it optimizes itself in the first ones."""
        self._parts: PartCalls | None = None
        """Calls in the last step, if compiled code is planned inside."""
        self._given_up: list[OnlineProfiler | OnlineCompiledProfiler] = []
        """Profilers still in force on models that were given up."""

    def on_step_begin(self, model: nn.Module, batch: Any, optimizers: tuple[Optimizer, ...]) -> None:
        """Begin to observe this step. Raises RehearsalError for a model that can't be planned."""
        if self._given_up:
            self.on_stop()
        check_not_scripted(model)
        self._is_hidden = has_torchscript(model) and self._n_runs < TORCHSCRIPT_RUNS
        if self._is_hidden:
            self._n_runs += 1
            return
        if self._observed is None:
            self._observed = self._profiler(model)
        if self._parts is not None:
            self._parts.clear()
        if self._on is None:
            self._on = _put_on(model, self._levers)
        try:
            self._observed.begin(batch, optimizers)
        except Busy as busy:  # a profiler or recording of the script, perhaps for some steps only
            self._is_hidden = True
            self.n_hidden += 1
            if self.n_hidden > PATIENCE:
                raise RehearsalError(str(busy)) from None

    def _profiler(self, model: nn.Module) -> OnlineProfiler | OnlineCompiledProfiler:
        inside_blocks = self.inside_blocks and not self._levers and has_planned_blocks(model)
        if self.compiled is None and not is_compiled(model) and not inside_blocks:
            if has_compiled_modules(model) and several_processes():
                self._notes = (WHOLE_IN_PROCESSES,)
            return OnlineProfiler(model, plain=self._plain, in_place=self._in_place, known_kinds=self._known_kinds)
        from lowtide.profiler.compiled_online import OnlineCompiledProfiler  # imports inductor, which takes seconds

        if self._levers:
            raise RehearsalError(
                f"{find_name(model)} is compiled as a whole, and in a loop no lever can be combined with that: leave "
                f"{', '.join(repr(lever.name) for lever in self._levers)} out, or call lowtide.fit in the script."
            )
        self._parts = PartCalls(model)
        return OnlineCompiledProfiler(model)

    def on_inner_call(self, called: Callable[..., Any], batch: Any) -> None:
        """Copy the arguments of a call, in case no single call runs all compiled code."""
        if self._parts is not None and not self.done:
            self._parts.add(called, batch)

    def make_trial_call(self, model: nn.Module, code: Callable[..., Any], batch: Any) -> TrialCall | None:
        """Return a function and its arguments, (args, kwargs), that run all compiled code of a step.

        The function is `code`, called with `batch`, or it repeats several calls. Return None if the arguments of some
        calls could not be copied.
        """
        is_one = code is not model or type(model) is not CompositeModel
        if self._parts is None or (is_one and len(self._parts) <= 1):
            return code, batch
        calls = self._parts.made()
        return (self._parts.run, (calls, {})) if calls else None

    def on_step_end(self, model: nn.Module) -> None:
        """End the observation of this step; make the profile once enough steps of the same work were observed.

        Raises RehearsalError if many steps have run, and too few of them do the same work.
        """
        if self._is_hidden:
            return
        assert self._observed is not None
        self._observed.end()
        self.n_steps += 1
        if self._observed.profile is not None:
            self._finish(self._observed)
        elif len(self._observed.why) >= MOST_UNUSABLE or self._observed.n_steps >= PATIENCE:
            differences = [*filter(None, [self._observed.other_kind]), *self._observed.why]
            if differences:
                what = f"of {self.n_steps} steps, no two that were compared did the same work: {differences[-1]}"
            else:
                what = f"no two of {self.n_steps} steps had batches of the same form"
            raise RehearsalError(f"{what}.\n{ONE_FORM}")

    def on_model_replaced(self, model: nn.Module) -> None:
        """Forget `model`, which is not the trained model, and its recordings."""
        if self._observed is not None:
            self._observed.give_up()
            self._given_up.append(self._observed)  # removed in the next step, because no hooks may be removed here
        self.done, self.profile, self._observed, self._parts = False, None, None, None
        self._known_kinds = frozenset()

    def on_steps_changed(self, model: nn.Module) -> None:
        """Forget the recordings, and rehearse until a kind of step has run that was not rehearsed before."""
        kinds = self._observed.kinds if isinstance(self._observed, OnlineProfiler) else frozenset()
        self.on_model_replaced(model)
        self._known_kinds = kinds

    def may_differ(self, *, creates_graph: bool) -> bool:
        """Return True if a step may differ from the rehearsed one only in backward; see `OnlineProfiler`.

        `creates_graph` is True if the step's backward builds a graph itself.
        """
        return isinstance(self._observed, OnlineProfiler) and self._observed.may_differ(creates_graph=creates_graph)

    def tell_kinds(self, calls: KnownCalls) -> None:
        """Record in `calls` if the rehearsed steps differed in what backward read, and if backward built a graph
        itself.
        """
        if isinstance(self._observed, OnlineProfiler):
            reads = {kind.reads for kind in self._observed.kinds}
            calls.several_backwards |= len(reads) > 1
            calls.builds_graphs |= any(graph for passes in reads for graph, _ in passes)

    @property
    def n_in_round(self) -> int:
        """The number of steps after which the sequence of kinds repeats itself, if a few kinds alternate; else 1."""
        return self._observed.n_in_round if isinstance(self._observed, OnlineProfiler) else 1

    def predict_peak_with(self, record: Callable[[Counter[int]], EventStream | None]) -> int | None:
        """Return the rehearsed step's peak if its compiled calls allocated the memory that `record` records.

        Return None if there is no recording; see `OnlineCompiledProfiler`.
        """
        if self._observed is None or isinstance(self._observed, OnlineProfiler):
            return None
        return self._observed.predict_peak_with(record)

    def replay_blocks_whole(self, model: nn.Module) -> bool:
        """Rehearse compiled blocks again, so that plans replay each block as a whole.

        Return False if that was done before, or if whole models or functions are compiled.
        """
        called = model.children() if type(model) is CompositeModel else (model,)
        if not self.inside_blocks or self.compiled is not None or all(map(is_compiled, called)):
            return False
        self.on_model_replaced(model)
        self.inside_blocks = False
        return True

    def restart(self) -> None:
        """Rehearse larger batches than before, reusing earlier results; one step usually suffices."""
        self.done, self.profile = False, None
        if self._parts is not None:
            self._parts.clear()
        if self._observed is not None:
            self._observed.restart()

    def on_release(self) -> None:
        """End the script by raising StopScript, unless the listener was created with `stop=False`."""
        if self._stop:
            raise StopScript

    def finish(self) -> None:
        """Make the profile from the largest batch size that occurred often enough, if there is no profile yet."""
        if self._observed is not None and not self.done:
            self._observed.finish()
            if self._observed.profile is not None:
                self._finish(self._observed)

    def on_stop(self) -> None:
        """Remove all hooks and levers."""
        for observed in (*self._given_up, *([] if self._observed is None else [self._observed])):
            observed.leave()
        self._given_up.clear()
        if self._on is not None:
            self._on.remove()
            self._on = None

    def _finish(self, observed: OnlineProfiler | OnlineCompiledProfiler) -> None:
        assert observed.profile is not None
        assert self._on is not None
        try:
            self._on.check()
        except LeverNotApplicable as why:
            raise RehearsalError(f"a requested lever is of no use here: {why}. Leave it out.") from why
        profile = with_checkpoint_notes(observed.profile, observed.checkpointed, None)
        self.profile = replace(profile, levers=self._levers, notes=(*profile.notes, *self._notes))
        self.done = True

    @property
    def n_sizes(self) -> int:
        """The number of batch sizes so far."""
        return 0 if self._observed is None else self._observed.n_sizes


def _put_on(model: nn.Module, levers: tuple[AppliedLever, ...]) -> LeverStack:
    try:
        return enable(model, levers, None)
    except LeverNotApplicable as why:
        raise RehearsalError(f"a requested lever can't be applied: {why}. Leave it out.") from why
