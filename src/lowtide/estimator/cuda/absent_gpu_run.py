"""Run two steps on fake tensors on an absent GPU, which replaces the model's own device, and estimate their memory."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self

import torch

from lowtide._torch.distributed import n_groups
from lowtide._torch.fake_modes import fake_mode, is_fake, without_function_modes, without_modes
from lowtide.errors import RehearsalError
from lowtide.estimator.absent_processes import AbsentProcesses, read_process_group
from lowtide.estimator.cuda.backend import gpu_in_use, take_place
from lowtide.estimator.cuda.current_gpu import CAPABILITY_ASSUMED, NAME, measured, taking, unbounded
from lowtide.estimator.cuda.gpu_allocation_tracker import GpuAllocationTracker
from lowtide.estimator.cuda.gpu_estimate import GpuMemoryEstimate, Outcome, describe_bounds
from lowtide.estimator.cuda.memory_stats import Usage
from lowtide.estimator.cuda.op_workspace import OpWorkspaces
from lowtide.estimator.cuda.ops.op_registry import READ_IN
from lowtide.estimator.cuda.placement import GpuPlacement, belongings
from lowtide.estimator.cuda.redirect import CudaRedirect, emulated_cuda
from lowtide.estimator.estimate_labels import labels
from lowtide.estimator.fake_step import (
    adopt,
    build_unrestored_note,
    compiled,
    exclusive,
    planned,
    unpatched,
    with_carryover,
)
from lowtide.estimator.fake_step_state import FakeStepState
from lowtide.estimator.fake_tensors import FakeTensors
from lowtide.estimator.sharded_units import on_host, units_on
from lowtide.estimator.two_step_run import TwoStepRun, exchange
from lowtide.estimator.values.queries import PythonQueries
from lowtide.levers import enable_plan_levers
from lowtide.memory.allocator.config import AllocatorConfig
from lowtide.memory.memory_timeline import Timeline
from lowtide.memory.nccl_memory import nccl_bytes
from lowtide.profiler.preconditions import NESTED
from lowtide.state.containers import make_container_restorer
from lowtide.state.process_group import several_processes

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from lowtide.memory.gpu_specs import GpuSpec
    from lowtide.planner.records import Plan
    from lowtide.runtime.engine import Engine


def estimate_on(
    gpu: GpuSpec,
    model: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    *,
    plan: Plan | None = None,
    optimizer: Optimizer | None = None,
    allocator: AllocatorConfig | None = None,
    n_gpus: int = 1,
    engine: Engine | None = None,
) -> GpuMemoryEstimate:
    """Estimate the memory of `step(batch)` on `gpu`. `lowtide.estimate` calls this function if a device is given.

    The step runs with `engine`, or under `plan` if `engine` is None. Without `allocator`, the allocator's settings are
    read from the environment. `n_gpus` is the number of processes, each with one GPU.
    """
    processes = read_process_group(n_gpus)
    engine = planned(model, plan) if engine is None else engine
    on_gpu = AbsentGpuRun(gpu, model, batch, (step, optimizer), engine=engine, allocator=allocator, processes=processes)
    with enable_plan_levers(plan, model, optimizer), on_gpu as rehearsal:
        hand_back = make_container_restorer(batch)
        step(batch)
        hand_back()
        rehearsal.second()
        step(batch)
        rehearsal.finish()
    return rehearsal.estimate()


class AbsentGpuRun(TwoStepRun):
    """Context manager under which the tensors of the model, the batch and `reached` are fake tensors on `gpu`.

    If `alone`, the process runs only this rehearsal, and the batch is on the GPU only while the script holds it.
    `engine` is active in both steps. `is_there` returns True if a real tensor is on CUDA already. `processes` train
    together, each on its own GPU.
    """

    _tracker: GpuAllocationTracker

    def __init__(
        self,
        gpu: GpuSpec,
        model: nn.Module,
        batch: Any,
        reached: tuple[Any, ...],
        *,
        engine: Engine | None = None,
        alone: bool = False,
        allocator: AllocatorConfig | None = None,
        is_there: Callable[[Tensor], bool] = lambda tensor: tensor.device.type == "cuda",
        processes: AbsentProcesses | None = None,
    ) -> None:
        self._gpu, self._alone = gpu, alone
        self._config = AllocatorConfig.from_environment() if allocator is None else allocator
        self._processes, self._n_groups = processes, 0
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise RehearsalError(
                    f"{type(module).__name__} is TorchScript, whose code can't run on a GPU that this machine does "
                    "not have. Estimate the model before it is scripted or traced, or without a device."
                )
        fakes = fake_mode(run_on_zeros=False, nested=RehearsalError(NESTED))
        self._begin(model, batch, fakes, planned(model, None) if engine is None else engine)
        self._tracker = GpuAllocationTracker(fakes, self.answers, OpWorkspaces(gpu))
        self._state = FakeStepState(model, *reached, *([] if alone else [batch]))
        self._placed = GpuPlacement(FakeTensors(self._fakes, NAME), self.answers, is_there, releases=alone)

    def __enter__(self) -> Self:
        take_place(alone=self._alone)
        with contextlib.ExitStack() as stack:
            stack.enter_context(exclusive(self._fakes))
            stack.enter_context(self._state)
            stack.enter_context(gpu_in_use(self._gpu))
            at_entry = belongings(self._model, self._batch, self._state.reached)
            self._on_host = on_host(self._state.reached)
            at_entry = [tensor for tensor in at_entry if id(tensor) not in self._on_host]
            if self._alone:
                self._batch = None
                stack.enter_context(_rare_collections())
            stack.enter_context(self._placed)
            device = torch.device(NAME, 0)
            stack.enter_context(units_on(device, self._state.reached, self._placed.fake_of))
            self._placed.put(at_entry)
            means, usage = CudaRedirect(NAME, self._tracker), Usage(self._tracker.ledger, self._config)
            stack.enter_context(emulated_cuda(self._gpu, means, usage, self._tracker, self.answers))
            stack.enter_context(self._tracker)
            stack.callback(taking.clear)
            taking.append(self._tracker.on_gpu)
            stack.enter_context(PythonQueries(self.answers, self._tracker))
            stack.enter_context(unpatched())
            self._start(stack, at_entry)
        return self

    def put(self, tensors: Iterable[Tensor], resized: Callable[[Tensor], Tensor]) -> None:
        """Move real tensors to the GPU, each with the size of `resized(tensor)`.

        Tensors that are fake already are resized, too, but stay on their device.
        """
        fakes: list[Tensor] = []
        real: list[Tensor] = []
        for tensor in {id(t): t for t in tensors if id(t) not in self._on_host}.values():
            (fakes if is_fake(tensor) else real).append(tensor)
        with without_function_modes():
            for tensor in fakes:
                if not self._placed.has(tensor):
                    with self._tracker.ledger.corrected():
                        exchange(tensor, resized(tensor))
            with without_modes():
                self._placed.put(real, resized)
            adopt(self._tracker, real)

    def second(self, batch: Any = None) -> None:
        """End the first step and begin the second one."""
        super().second(batch)
        self._count_groups()

    def _count_groups(self) -> None:
        """Count the process groups now, because the script may destroy them before it ends."""
        self._n_groups = max(self._n_groups, n_groups() if several_processes() else 0)

    def _learn(self) -> None:
        """Do nothing, because kernels of an absent GPU can't be run in a trial."""

    def finish(self) -> None:
        """End the second step, which is estimated."""
        super().finish()
        self._tracker.unbounded |= unbounded
        self._measured = tuple(measured.values())
        self._count_groups()

    def estimate(self, n_passes: int = 0) -> GpuMemoryEstimate:
        """Return the estimate. Call this after the `with` block has ended.

        `n_passes` is the number of forward and backward passes if no optimizer has stepped, else 0.
        """
        stream, bounds = self._tracker.ledger.stream, self._tracker.bounds
        processes, is_bounded = self._processes, not (self._tracker.unbounded or self._reducers.unknown)
        beside = nccl_bytes(self._n_groups)
        outcome = Outcome(self._tracker.ledger.whole, bounds, self._config, is_bounded=is_bounded, beside=beside)
        needs, interval = outcome.needs()
        assert self._static is not None
        assert self._labelled_trace is not None
        return GpuMemoryEstimate(
            timeline=Timeline(stream, labels(stream, self._labelled_trace) | self._tracker.ledger.labels),
            static=with_carryover(self._static, self._blocks, stream),
            unknown=(
                *self._tracker.unbounded.values(),
                *self._reducers.unknown,
                *self._measured,
                *describe_bounds(outcome.whole, bounds),
            ),
            assumed=(
                *_list_assumptions(self._gpu),
                *compiled(self._model),
                *self.answers.notes,
                *build_unrestored_note(self._state),
            ),
            measured=self._measured,
            n_passes=n_passes,
            has_one_step=self._has_one_step,
            processes=processes,
            is_bounded=is_bounded,
            nccl=beside,
            flops=self._tracker.n_flops,
            gpu=self._gpu,
            whole=outcome.whole,
            bounds=bounds,
            config=self._config,
            needs=needs,
            interval=interval,
            outcome=outcome,
        )


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage a tenth as often in this block, because a rehearsal creates many more objects than its step."""
    often = gc.get_threshold()
    gc.set_threshold(10 * often[0], *often[1:])
    try:
        yield
    finally:
        gc.set_threshold(*often)


def _list_assumptions(gpu: GpuSpec) -> Iterator[str]:
    if gpu.capability is None:
        major, minor = CAPABILITY_ASSUMED
        yield f"compute capability {major}.{minor}: only the memory of the GPU was given"
    if not torch.__version__.startswith(f"{READ_IN}."):
        yield f"CUDA's behaviours of torch {READ_IN}, whose sources were read: this is torch {torch.__version__}"
