"""Run two steps on fake tensors on the model's own device, and estimate their memory.

`cuda/absent_gpu_run.py` does the same on a GPU that the machine does not have.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

from lowtide._torch.fake_modes import fake_mode, is_fake, without_function_modes, without_modes
from lowtide.errors import RehearsalError
from lowtide.estimator.allocation_tracker import AllocationTracker
from lowtide.estimator.cpu.scratch import Scratch
from lowtide.estimator.cpu.scratch_trials import Trials
from lowtide.estimator.ddp_buckets import Reducers
from lowtide.estimator.estimate_labels import EstimateTrace, labels
from lowtide.estimator.fake_step import (
    adopt,
    build_unrestored_note,
    compiled,
    exclusive,
    measure_static,
    planned,
    rng_states_counted,
    unpatched,
    with_carryover,
)
from lowtide.estimator.fake_step_state import FakeStepState
from lowtide.estimator.fake_tensors import placed, swap
from lowtide.estimator.memory_estimate import MemoryEstimate
from lowtide.estimator.sharded_units import sharding
from lowtide.estimator.values.queries import PythonQueries
from lowtide.estimator.values.value_oracle import ValueOracle
from lowtide.memory.memory_timeline import Timeline
from lowtide.profiler.preconditions import NESTED
from lowtide.runtime.batch_tensors import collect_tensors
from lowtide.runtime.fingerprint import device_of
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lowtide._torch.fake_modes import FakeTensorMode
    from lowtide.planner.records import Static
    from lowtide.runtime.engine import Engine


class TwoStepRun:
    """Context manager under which operators on the model's device allocate nothing, and record their allocations.

    Run one step, call `second`, run a second step, call `finish`. The second step is estimated. All state is restored
    at the end of the block. If a script may run only one step, also call `second` before the first step and `end_step`
    after it. If no second step follows, the first one is estimated.
    """

    _tracker: AllocationTracker
    _reducers: Reducers

    def __init__(self, model: nn.Module, batch: Any, reached: tuple[Any, ...], *, engine: Engine | None = None) -> None:
        self._device = device_of(model).replace("meta", "cpu")
        engine = planned(model, None) if engine is None else engine
        self._begin(model, batch, fake_mode(nested=RehearsalError(NESTED)), engine)
        self._trials = Trials()
        self._scratch = Scratch(self._device, self._trials)
        self._tracker = AllocationTracker(self._device, self._fakes, self.answers, self._scratch)
        self._state = FakeStepState(model, *reached, batch)
        self._resized: list[tuple[Tensor, Tensor]] = []
        """Resized tensors, each paired with a tensor of its former size."""

    def _begin(self, model: nn.Module, batch: Any, fakes: FakeTensorMode, engine: Any) -> None:
        self._model, self._batch, self._fakes, self._engine = model, batch, fakes, engine
        self.answers = ValueOracle(fakes)
        self._stack, self._running = contextlib.ExitStack(), contextlib.ExitStack()
        self._static: Static | None = None
        self._blocks: frozenset[int] = frozenset()
        self._labelled_trace: EstimateTrace | None = None
        self._left: list[str] = []
        """Descriptions of memory that the last step has allocated and not freed."""
        self._has_one_step = False
        """True if the estimated step is the only one."""

    @contextlib.contextmanager
    def _first_step(self) -> Iterator[None]:
        """Install the plan's engine in this `with` block, for the first step. Only the second step labels memory."""
        if not self._engine.does_anything:
            yield
            return
        self._engine.install()
        try:
            yield
        finally:
            self._engine.remove()

    def __enter__(self) -> Self:
        everything = (*self._model.parameters(), *self._model.buffers(), *collect_tensors(self._batch))
        with contextlib.ExitStack() as stack:
            stack.enter_context(exclusive(self._fakes))
            stack.enter_context(placed(everything, self._device, self._fakes))
            stack.enter_context(self._state)
            stack.callback(self._restore)
            stack.enter_context(self._tracker)
            stack.enter_context(PythonQueries(self.answers, self._tracker))
            stack.enter_context(unpatched())
            stack.enter_context(rng_states_counted(self._tracker))
            self._start(stack, everything)
        return self

    def _start(self, stack: contextlib.ExitStack, at_entry: Sequence[Tensor]) -> None:
        """Begin the first step with the tensors `at_entry` in memory. Its context managers are entered on `stack`."""
        stack.enter_context(self._running)
        with without_function_modes():
            adopt(self._tracker, at_entry)
            self._reducers = stack.enter_context(Reducers(self._state.reached, self._tracker))
            stack.enter_context(sharding(self._state.reached, self._tracker))
        self._running.enter_context(self._first_step())
        self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def put(self, tensors: Iterable[Tensor], resized: Callable[[Tensor], Tensor]) -> None:
        """Replace the content of each tensor by that of `resized(tensor)`, in the run and in its records.

        Real tensors get their own content back when the run ends.
        """
        with without_function_modes():
            for tensor in {id(t): t for t in tensors}.values():
                if is_fake(tensor):
                    with self._tracker.ledger.corrected():
                        exchange(tensor, resized(tensor))
                    continue
                with without_modes():
                    other = resized(tensor)
                if other is not tensor:
                    swap(tensor, other)
                    self._resized.append((tensor, other))
                adopt(self._tracker, [tensor])

    def _restore(self) -> None:
        for tensor, other in reversed(self._resized):
            swap(tensor, other)
        self._resized.clear()

    def assume_length(self, lengths: tuple[int, int] | None) -> None:
        """Count new tensors of length `lengths[0]` as if they had the length `lengths[1]`, from now on.

        This is needed until `put` has given the batch its new length.
        """
        self._tracker.ledger.lengths = lengths

    @property
    def has_updated(self) -> bool:
        """True if an optimizer has stepped."""
        return bool(self._state.optimizers)

    def switch_model(self, model: nn.Module, in_use: Iterable[Any], engine: Engine | None = None) -> None:
        """Continue with steps that train `model`, which may be a new one. The caller must call `second` next.

        Objects that can be reached neither from this model nor from `in_use` are released, and no longer counted.
        """
        self._running.close()
        self._state.visit(model)
        real = [tensor for tensor in (*model.parameters(), *model.buffers()) if not is_fake(tensor)]
        self.put(real, lambda tensor: tensor)
        self._model, self._labelled_trace = model, None
        self._engine = planned(model, None) if engine is None else engine
        with without_modes():
            self._state.release_unreached(model, self._batch, *in_use)
            gc.collect()  # the engine of the former model is part of a reference cycle

    def second(self, batch: Any = None) -> None:
        """End the first step and begin the second one, which is estimated. If given, `batch` replaces the batch."""
        self._running.close()
        with without_function_modes():
            self._learn()
            self._static, self._blocks = self._measure_static(self._batch if batch is None else batch)
        self._tracker.begin()
        self._labelled_trace = EstimateTrace(self._engine, self._tracker.ledger.mark)
        self._running.enter_context(self._labelled_trace.running())

    def _measure_static(self, batch: Any) -> tuple[Static, frozenset[int]]:
        """Return the memory that would exist before a step that begins now, and the numbers of its blocks."""
        return measure_static(self._tracker, self._model, batch, self._state, self._reducers.buckets)

    def end_step(self) -> None:
        """Record the end of a step. This step is estimated if no other step follows."""
        assert self._static is not None
        with without_function_modes():
            after, _ = self._measure_static(())
        more = {
            "optimizer state": after.optimizer - self._static.optimizer,
            "gradients": after.gradients - self._static.gradients,
        }
        self._left = [f"{format_bytes(n_bytes)} of {name}" for name, n_bytes in more.items() if n_bytes > 0]
        self._tracker.ledger.end_step()

    def finish_only(self) -> None:
        """End the run after its only step, which is estimated. Events after that step are forgotten."""
        self._has_one_step = True
        self._tracker.ledger.forget_later()
        begins = f": a second one would begin with {' and '.join(self._left)} that this one made" if self._left else ""
        self.answers.notes[f"the script takes one step{begins}"] = None
        self.finish()

    def _learn(self) -> None:
        """Measure the scratch memory of operators that were unknown in the first step."""
        self._trials.learn()

    def finish(self) -> None:
        """End the second step, which is estimated."""
        self._running.close()
        assert self._labelled_trace is not None
        self._labelled_trace.state(self._state.optimizers)

    def estimate(self, n_passes: int = 0) -> MemoryEstimate:
        """Return the estimate. Call this after the `with` block has ended.

        `n_passes` is the number of forward and backward passes if no optimizer has stepped.
        """
        stream, passes = self._tracker.ledger.stream, "passes" if n_passes > 1 else "pass"
        assert self._static is not None
        assert self._labelled_trace is not None
        return MemoryEstimate(
            timeline=Timeline(stream, labels(stream, self._labelled_trace) | self._tracker.ledger.labels),
            static=with_carryover(self._static, self._blocks, stream),
            flops=self._tracker.n_flops,
            unknown=(*self._scratch.unknown, *self._untried(), *self._reducers.unknown),
            assumed=(
                *compiled(self._model),
                *([f"no optimizer stepped: {n_passes} forward and backward {passes}"] if n_passes else ()),
                *self.answers.notes,
                *build_unrestored_note(self._state),
            ),
        )

    def _untried(self) -> Iterator[str]:
        for op, n_bytes in self._trials.unknown.items():
            yield f"{op}: scratch memory, beside arguments of {n_bytes} bytes"


def exchange(tensor: Tensor, other: Tensor) -> None:
    """Exchange the contents of two tensors. The old content of `tensor` is freed together with `other`."""
    if other is not tensor:
        swap(tensor, other)
