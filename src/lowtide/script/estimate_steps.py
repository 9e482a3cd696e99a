"""Estimate a script's memory by running its first two training steps, or its only one, on fake tensors."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from lowtide._torch.modes import saved_tensor_hooks
from lowtide._torch.tensors import get_storage_id
from lowtide.errors import LowtideError, RehearsalError
from lowtide.estimator.cuda.absent_gpu_run import AbsentGpuRun
from lowtide.estimator.cuda.deferred_placement import DeferredCudaModule
from lowtide.estimator.cuda.placement import is_given
from lowtide.estimator.cuda.process_groups import taken_as_own
from lowtide.estimator.fake_step import COMPILED
from lowtide.estimator.packed_sequences import list_batch_sizes
from lowtide.estimator.two_step_run import TwoStepRun
from lowtide.runtime.batch_tensors import collect_tensors
from lowtide.runtime.fsdp_scopes import find_units, list_own_parameters
from lowtide.runtime.live_optimizers import find_optimizers
from lowtide.script.alternating_models import (
    PATIENCE,
    caller_has_other_optimizers,
    collect_held_ids,
    ids,
    parameter_ids,
)
from lowtide.script.calling_code import find_caller_optimizers, find_caller_variables
from lowtide.script.estimate_batches import BatchSize, FirstCalls
from lowtide.script.estimate_engine import EstimateEngine
from lowtide.script.estimate_patches import cuda_for_a_script, steps_of_a_script
from lowtide.script.manual_updates import has_others
from lowtide.script.run_listened import run_watched
from lowtide.script.runner import Script
from lowtide.script.skipped_saves import SkippedSaves
from lowtide.script.step_listener import StepListener, StopScript
from lowtide.state.reachable_state import ReachableState

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from lowtide.estimator.absent_processes import AbsentProcesses
    from lowtide.estimator.cuda.gpu_estimate import GpuMemoryEstimate
    from lowtide.estimator.memory_estimate import MemoryEstimate
    from lowtide.estimator.unrehearsed_plans import How
    from lowtide.estimator.values.value_oracle import ValueOracle
    from lowtide.memory.gpu_specs import GpuSpec
    from lowtide.planner.records import Plan


BY_HAND = "a step is over when the model is called after its parameters changed: no torch.optim.Optimizer updates them"


NO_GROUP = "the script has started no process group (torch.distributed.init_process_group): each process is alone"

MOST_PASSES = 32
"""Number of forward and backward passes after which a script without an optimizer is ended."""


class StepEstimator(StepListener):
    """A listener that runs a script's first two steps on fake tensors, from the model's first forward on, and then ends
    the script.

    The estimate is of the second step, or of the first if the script runs only one.

    The tensors are on `gpu`, which the machine need not have; without `gpu`, each is on the device on which the script
    has put it.

    With `size`, every reachable tensor whose first dimension has the batch's length gets that size: tensors that the
    model is called with, and tensors in variables of the functions that call it.
    """

    awaits = "was rehearsed: that takes two steps"
    accepts_one_step = True
    """False if a script has to take two steps."""
    plans_compiled = False  # compiled functions run uncompiled

    def __init__(
        self,
        gpu: GpuSpec | None,
        size: int | None,
        on_entered: Callable[[], None],
        processes: AbsentProcesses | None = None,
        *,
        how: How = "plain",
        plan: Plan | None = None,
    ) -> None:
        self.done = False
        self.estimate: MemoryEstimate | None = None
        self._gpu, self._on_entered, self._processes = gpu, on_entered, processes
        self._engine = EstimateEngine(how, plan, on_any_device=gpu is not None)
        self._batch_size, self._first_calls = BatchSize(size), FirstCalls()
        self._rehearsal: TwoStepRun | None = None
        self._model: nn.Module | None = None
        self._optimizers: tuple[Optimizer, ...] = ()
        self._n_steps = 0
        self._has_group = False
        """True once a step has begun with a process group, which the script may destroy before it ends."""
        self._has_only = False
        """True if one step was observed from its first call to its end, and no other has begun."""
        self._n_waited = 0
        """Number of further steps in which another model that takes turns was waited for."""
        self.asked = DeferredCudaModule()
        self.saves = SkippedSaves()
        self.answers: ValueOracle | None = None
        """Known contents of the fake tensors; None before the first forward."""
        self._data: dict[int, int] = {}
        """Storages of the parameters, by the parameters' ids, at the last check."""
        self.compiles = False
        """True if the script compiles anything."""
        self._n_passes = 0
        """Number of forward and backward passes since the first forward, as long as no optimizer exists."""
        self._has_run_backward = False
        """True if a backward pass ran since the model was called last."""
        self._held_up: tuple[nn.Module, tuple[Optimizer, ...]] | None = None
        """The model and its optimizers, if the first forward could not be put on the GPU."""

    def on_step_begin(self, model: nn.Module, batch: Any, optimizers: tuple[Optimizer, ...]) -> None:
        """Switch to fake tensors when the first step begins; when the second step begins, begin its estimate."""
        resizing = self._batch_size.find_resizable_tensors(batch, is_first=True)
        self._optimizers = optimizers
        self._first_calls.begin_step()
        if self._rehearsal is None:
            if not self._may_enter([batch, *model.parameters()]):
                self._held_up = model, optimizers
                return
            self._enter(model, batch, resizing)
        elif model is not self._model:
            self._turn_to(model, batch)
        assert self._rehearsal is not None
        self._batch_size.resize(resizing, self._rehearsal)
        if self._n_steps == 1:
            self._rehearsal.second(batch)
            self._engine.check_batch(model, batch)
        elif not find_caller_optimizers():
            self._begin_next_pass(batch)
        elif self.accepts_one_step:
            self._rehearsal.second(batch)
        self._has_only = False
        self._has_group |= torch.distributed.is_initialized()
        self._model = model
        self._data = _storages(model)
        self._rehearsal.answers.written.clear()

    def on_inner_call(self, called: Callable[..., Any], batch: Any) -> None:
        """Add a note on varying batch sizes if the first calls of both steps differ only in the sizes of tensors."""
        if self._rehearsal is None:
            return
        sizes = self._first_calls.differ_in_size(called, batch)
        if sizes is not None and self._n_steps == 1 and self._batch_size.size is None:
            self._rehearsal.answers.notes[
                f"batches are of several sizes, and these two steps had {sizes[0]} and {sizes[1]}: larger ones need "
                "more"
            ] = None

    def is_abandoned(self, model: nn.Module, other: nn.Module) -> bool:
        """Return True if neither the script's variables nor the module `other` lead to any part of `model`."""
        if self._rehearsal is None:
            return False
        reached = ids(ReachableState(*find_caller_variables(), other).visited)
        return not reached & ids(model.modules())

    def _turn_to(self, model: nn.Module, batch: Any) -> None:
        """Switch to another trained model. If the former model was freed, estimate two steps of `model`."""
        assert self._rehearsal is not None
        former = None if self._model is None else weakref.ref(self._model)
        self._model = model
        self._rehearsal.switch_model(model, find_caller_variables(), self._engine.make(model, batch))
        if former is not None and former() is None:
            self._n_steps = 0

    def on_model_found(self, model: nn.Module, optimizers: tuple[Optimizer, ...]) -> None:
        """Switch a found model, with parameters outside modules, to fake tensors right after its first step, because
        the next step begins before a call of the model.
        """
        self._optimizers = optimizers
        self._enter(model, [])

    def on_further_call(self, batch: Any) -> None:
        """Resize the batch of a later call in a step. Without an optimizer, a call after backward begins a new pass."""
        if self._rehearsal is None and self._held_up is not None and self._has_run_backward:
            self.on_step_begin(self._held_up[0], batch, self._held_up[1])
            return
        resizing = self._batch_size.find_resizable_tensors(batch, is_first=False)
        if self._rehearsal is not None:
            self._batch_size.resize(resizing, self._rehearsal)
        is_alone = (
            self._n_passes and not self._n_steps and self._rehearsal is not None and not self._rehearsal.has_updated
        )
        if is_alone and self._has_run_backward and not find_caller_optimizers():
            if self._n_passes == MOST_PASSES:
                self._conclude()
                raise StopScript
            self._begin_next_pass(batch)

    def on_backward_end(self) -> None:
        """Record that a backward pass is over."""
        self._has_run_backward = True

    def on_checkpoint(self, function: Any, batch: Any) -> None:
        """Switch the model to fake tensors if `function`, which is about to be checkpointed, calls the model itself.

        While a checkpoint runs, real tensors can't be replaced.
        """
        if self._rehearsal is not None or not torch.is_grad_enabled() or not self._may_enter(batch):
            return
        cells = [
            cell.cell_contents for cell in getattr(function, "__closure__", None) or ()
        ]  # an attribute that is set in torch's own functions
        for module in ReachableState(function, *cells).modules:
            if module.training and any(p.requires_grad for p in module.parameters()):
                self._enter(module, batch)
                self._model = module
                return

    def _may_enter(self, inputs: Any) -> bool:
        """Return True if fake tensors may replace real ones here: outside checkpoints, and if no input has a graph.

        A graph that began on real tensors has to end on them. `inputs` include the parameters, which
        `torch.func.functional_call` may replace by computed tensors.
        """
        return saved_tensor_hooks() is None and all(tensor.is_leaf for tensor in collect_tensors(inputs))

    def finish(self) -> None:
        """Conclude the estimate at the end of a script that ran only one step, or passes without an optimizer."""
        if self._rehearsal is None:
            return
        if self._has_only or (self._n_passes and not self._rehearsal.has_updated and self._count_backward_passes()):
            self._conclude()

    def _count_backward_passes(self) -> int:
        """Count the forward passes that were followed by a backward pass."""
        return self._n_passes - (not self._has_run_backward)

    def _begin_next_pass(self, batch: Any) -> None:
        """Begin a forward pass of a script without an optimizer, in which passes are counted instead of steps."""
        assert self._rehearsal is not None
        self._rehearsal.second(batch)
        self._n_passes += 1
        self._has_run_backward = False

    def _enter(self, model: nn.Module, batch: Any, resizing: Sequence[Tensor] = ()) -> None:
        """Replace the model's tensors and other reachable ones by fake tensors, but leave out `resizing`: these are
        resized first.
        """
        for unit in find_units(model.modules()):
            unit.reshard()  # type: ignore[operator]  # whole after an evaluation, and gathered again by the next forward
        state = ReachableState(*find_caller_variables())
        later = (*resizing, *list_batch_sizes(batch))
        batch = [tensor for tensor in collect_tensors(batch) if not _is_in(later, tensor)]
        rehearsal = self._run(model, batch, (self._optimizers, state.modules))
        rehearsal.__enter__()
        self._rehearsal, self.answers = rehearsal, rehearsal.answers
        self.saves.begin(self.answers.note)
        self._on_entered()
        # Parameters outside modules, and sums whose device a loop compares, as transformers' Trainer does.
        tensors = [t for t in state.tensors if t.requires_grad or not t.dim() or self.asked.has(t)]
        tensors += (t for t in state.visited if isinstance(t, torch.Tensor) and not t.is_leaf and is_given(t))
        rehearsal.put([tensor for tensor in tensors if not _is_in(resizing, tensor)], lambda tensor: tensor)

    def _run(self, model: nn.Module, batch: Sequence[Tensor], reached: tuple[Any, ...]) -> TwoStepRun:
        """Build the run of two steps on fake tensors: on the absent GPU, if one was given."""
        engine = self._engine.make(model, batch)
        if self._gpu is None:
            return TwoStepRun(model, batch, reached, engine=engine)
        return AbsentGpuRun(self._gpu, model, batch, reached, engine=engine, **self._on_gpu())

    def _on_gpu(self) -> dict[str, Any]:
        """Return the settings of a script's run on an absent GPU."""
        return {"alone": True, "is_there": self.asked.has, "processes": self._processes}

    def on_step_end(self, model: nn.Module) -> None:
        """Count a step; after the second, restore all real tensors and end the script."""
        if self._rehearsal is None:  # a real step, in which optimizers have made their state
            self._optimizers = tuple({id(o): o for o in (*find_optimizers(model), *find_caller_optimizers())}.values())
            self._enter(model, [])
            return
        self._n_steps += 1
        if self._n_steps == 2 and self._n_waited < PATIENCE and caller_has_other_optimizers(model):
            self._n_waited += 1
            self._n_steps = 1
        if self._n_steps == 2:
            self._conclude()
            raise StopScript
        if self._n_steps == 1 and self.accepts_one_step:
            self._rehearsal.end_step()
            self._has_only = True
        self._batch_size.expect_next(self._rehearsal)

    def _conclude(self) -> None:
        """End the run on fake tensors, restore all real tensors, and keep the result."""
        rehearsal = self._rehearsal
        assert rehearsal is not None
        assert self._model is not None
        self._engine.check_model(self._model)
        if self.compiles:
            rehearsal.answers.note(COMPILED)
        if self._processes is not None and not self._has_group:
            rehearsal.answers.note(NO_GROUP)
        rehearsal.answers.notes.update(taken_as_own)
        if self._has_only:
            rehearsal.finish_only()
        else:
            rehearsal.finish()
        self.on_stop()
        n_passes = 0 if rehearsal.has_updated or self._n_steps else self._count_backward_passes()
        self._answer(rehearsal, n_passes)
        self.done = True

    def _answer(self, run: TwoStepRun, n_passes: int) -> None:
        """Keep the memory estimate of `run`, which has ended. `FakeRehearsing` keeps a profile instead."""
        self.estimate = run.estimate(n_passes)

    def on_model_replaced(self, model: nn.Module) -> None:
        """Count the steps of another model from now on. Its tensors are fake already, because all reachable tensors
        were replaced.

        If an update has run, the step so far counts as the first one.
        """
        self._has_only = False
        self._n_steps = int(self._rehearsal is not None and self._rehearsal.has_updated)

    def detect_update(self, model: nn.Module) -> bool:
        """Return True if parameters of `model` were written to or replaced, and the script has no optimizer of them."""
        mine = parameter_ids(model)
        if self.answers is None or has_others(model):
            return False
        if any(collect_held_ids(optimizer) & mine for optimizer in find_caller_optimizers()):
            return False
        before, self._data = self._data, _storages(model)
        written = {*self._data.values()} & self.answers.written
        self.answers.written.clear()
        is_updated = bool(written) or (bool(before) and before != self._data)
        if is_updated:
            self.answers.notes[BY_HAND] = None
        return is_updated

    def on_stop(self) -> None:
        """Restore all real tensors and remove all patches, if the run is still in progress."""
        if self._rehearsal is not None:
            rehearsal, self._rehearsal = self._rehearsal, None
            rehearsal.__exit__(None, None, None)
        self._engine.remove_levers()


@overload
def estimate_script(
    script: Script,
    gpu: GpuSpec,
    size: int | None = None,
    *,
    on_entered: Callable[[], None] = ...,
    processes: AbsentProcesses | None = None,
    how: How = "plain",
    plan: Plan | None = None,
) -> tuple[int, GpuMemoryEstimate | None]: ...


@overload
def estimate_script(
    script: Script,
    gpu: GpuSpec | None,
    size: int | None = None,
    *,
    on_entered: Callable[[], None] = ...,
    processes: AbsentProcesses | None = None,
    how: How = "plain",
    plan: Plan | None = None,
) -> tuple[int, MemoryEstimate | None]: ...


def estimate_script(
    script: Script,
    gpu: GpuSpec | None,
    size: int | None = None,
    *,
    on_entered: Callable[[], None] = lambda: None,
    processes: AbsentProcesses | None = None,
    how: How = "plain",
    plan: Plan | None = None,
) -> tuple[int, MemoryEstimate | None]:
    """Estimate the memory of `script` from at most two steps on fake tensors; return its exit code and the estimate.

    With `gpu` the script runs as on that GPU, as one of `processes`. `on_entered` is called just after real tensors
    were replaced by fake ones. `how` says if the steps on `gpu` run plainly or with recomputes; with `plan` they run
    under that plan.

    Raises the errors of a rehearsal, with the line of the script that caused them, RehearsalError for a script that
    failed after a save was skipped, and StalePlan for a plan of another model or a smaller batch.
    """
    listener = StepEstimator(gpu, size, on_entered, processes, how=how, plan=plan)
    return run_on_fakes(script, listener, gpu, processes), listener.estimate


def run_on_fakes(
    script: Script, listener: StepEstimator, gpu: GpuSpec | None, processes: AbsentProcesses | None = None
) -> int:
    """Run `script` on fake tensors with `listener`, as on `gpu` and as one of `processes`; return its exit code.

    Raises the errors of `estimate_script`.
    """
    with contextlib.ExitStack() as stack:
        if gpu is not None:
            stack.enter_context(cuda_for_a_script(gpu, listener, processes))
        stack.enter_context(steps_of_a_script(listener))
        stack.enter_context(listener.saves)
        try:
            code = run_watched(script, listener)
        except LowtideError as error:
            first = None if listener.answers is None else listener.answers.refused
            raise first or error  # noqa: B904 the last one came of cleaning up after the first
    if code and not listener.done and listener.saves.skipped:
        raise RehearsalError(
            f"{script.target} ended with exit code {code}, before two steps of it were rehearsed.\n"
            f"  An estimate saves nothing ({', '.join(listener.saves.skipped)}), so a file that the script reads back "
            "is missing.\n  Leave that out for the estimate, or rehearse real steps: lowtide rehearse."
        )
    return code


def _storages(model: nn.Module) -> dict[int, int]:
    """Return the id of each parameter's storage, by the parameter's id."""
    return {id(p): get_storage_id(p) for p in list_own_parameters(model)}


def _is_in(tensors: Iterable[Tensor], tensor: Tensor) -> bool:
    return any(tensor is one for one in tensors)
