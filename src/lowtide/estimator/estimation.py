"""`lowtide.estimate`: run a training step on fake tensors, and report the memory that it will need."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from lowtide._torch.fake_modes import (
    fake_mode,
)
from lowtide.errors import RehearsalError
from lowtide.estimator.allocation_tracker import AllocationTracker
from lowtide.estimator.cpu.scratch import Scratch
from lowtide.estimator.cpu.scratch_trials import Trials
from lowtide.estimator.ddp_buckets import Reducers
from lowtide.estimator.estimate_labels import Names, labels
from lowtide.estimator.fake_step_state import Everything
from lowtide.estimator.fake_tensors import placed
from lowtide.estimator.sharded_units import sharding
from lowtide.estimator.values.assumptions import ValueOracle
from lowtide.estimator.values.queries import PythonQueries
from lowtide.levers import enable_plan_levers
from lowtide.memory.gpu_specs import GpuSpec, parse_gpus
from lowtide.memory.memory_timeline import Timeline
from lowtide.planner.records import Plan
from lowtide.profiler.preconditions import NESTED, check
from lowtide.runtime.fingerprint import device_of, tensors_in
from lowtide.state.containers import container_restorer

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.estimator.cuda.gpu_estimate import GpuMemoryEstimate
    from lowtide.memory.allocator.config import AllocatorConfig
from lowtide.estimator.fake_step import adopt, compiled, exclusive, left, planned, static_of, unpatched, with_carryover
from lowtide.estimator.memory_estimate import MemoryEstimate


@overload
def estimate(
    model: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    *,
    plan: Plan | None = None,
    optimizer: Optimizer | None = None,
) -> MemoryEstimate: ...


@overload
def estimate(
    model: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    *,
    device: str | GpuSpec,
    plan: Plan | None = None,
    optimizer: Optimizer | None = None,
    allocator: AllocatorConfig | None = None,
) -> GpuMemoryEstimate: ...


def estimate(
    model: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    *,
    device: str | GpuSpec | None = None,
    plan: Plan | None = None,
    optimizer: Optimizer | None = None,
    allocator: AllocatorConfig | None = None,
) -> MemoryEstimate:
    """Estimate the memory of `step(batch)` without allocating it: the peak, and the tensors alive at each moment.

    `step` runs twice on fake tensors; the second run counts, because the optimizer has its state by then. Parameters
    may be real or on the meta device (the step is then one on the CPU). Afterwards everything is restored, even if the
    step raises: no real tensor is ever written to, and Python objects hold the same objects as before.

    Contents that follow from integer and boolean batches, small tensors and buffers are known, so masks and lengths are
    the true ones. Only trials allocate memory: an operator with unknown scratch memory is run once on its own if its
    arguments have at most 64 MiB; otherwise it is listed in `unknown`.

    Args:
        model: the model that the step trains.
        step: runs forward and backward of `model`, and optionally the optimizer.
        batch: the argument of `step`.
        device: a GPU, by name or as a GpuSpec, or several, "8 x h100-80", one for each process of the process group;
            without it the step is estimated on the model's own device.
        plan: the plan under which the step runs.
        optimizer: needed only if neither the step nor the model refers to it.
        allocator: settings of the CUDA caching allocator, by default the environment's; only with `device`.

    Returns:
        The estimate: `peak_bytes`, the timeline, and the operators whose scratch memory is unknown.

    Raises:
        DataDependentStepError: the step branches on contents of other tensors; the error names the line.
        RehearsalError: the step can't be rehearsed.
        StalePlan: the plan is for another model.

    Example:
        >>> import torch, lowtide
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> batch = torch.ones(128, 64)
        >>> def step(batch):
        ...     model(batch).square().mean().backward()
        >>> lowtide.estimate(model, step, batch).peak_bytes
        789256
    """
    if plan is not None:
        Plan.expect(plan, "estimate")
    check(model, step, batch)
    if device is not None:
        from lowtide.estimator.cuda.two_step_run import estimate_on  # imported only for estimates on a GPU

        gpu, n = parse_gpus(device)
        return estimate_on(gpu, model, step, batch, plan=plan, optimizer=optimizer, allocator=allocator, n_gpus=n or 1)
    own = device_of(model).replace("meta", "cpu")
    engine = planned(model, batch, plan, own)
    fakes = fake_mode(nested=RehearsalError(NESTED))
    answers, trials = ValueOracle(fakes), Trials()
    ledger = AllocationTracker(own, fakes, answers, scratch := Scratch(own, trials))
    everything = (*model.parameters(), *model.buffers(), *tensors_in(batch))
    kept, hand_back = Everything(model, step, batch, optimizer), container_restorer(batch)
    with exclusive(fakes), placed(everything, own, fakes), kept, enable_plan_levers(plan, model, optimizer):
        names = Names(engine, ledger.mark)
        with ledger, PythonQueries(answers, ledger), unpatched():
            adopt(ledger, everything)
            with Reducers(kept.reached, ledger) as reducers, sharding(kept.reached, ledger):
                step(batch)
                trials.learn()
                hand_back()
                static, blocks = static_of(ledger, model, batch, kept, reducers.buckets)
                ledger.begin()
                with names.running():
                    step(batch)
                names.state(kept.optimizers)
    scratch_unknown = (f"{op}: scratch memory, beside arguments of {n} bytes" for op, n in trials.unknown.items())
    return MemoryEstimate(
        timeline=Timeline(ledger.stream, labels(ledger.stream, names) | ledger.labels),
        static=with_carryover(static, blocks, ledger.stream),
        unknown=(*scratch.unknown, *scratch_unknown),
        assumed=(*compiled(model), *answers.notes, *left(kept)),
    )
