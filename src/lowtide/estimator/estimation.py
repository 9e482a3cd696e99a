"""`lowtide.estimate`: run a training step on fake tensors, and report the memory that it will need."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from lowtide.estimator.fake_step import planned
from lowtide.estimator.memory_estimate import MemoryEstimate
from lowtide.estimator.sharded_units import check_estimated
from lowtide.estimator.two_step_run import TwoStepRun
from lowtide.levers import enable_plan_levers
from lowtide.memory.gpu_specs import GpuSpec, parse_gpus
from lowtide.planner.records import Plan
from lowtide.profiler.preconditions import check_step
from lowtide.runtime.fingerprint import device_of
from lowtide.state.containers import make_container_restorer

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.estimator.cuda.gpu_estimate import GpuMemoryEstimate
    from lowtide.memory.allocator.config import AllocatorConfig


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
    may be real or on the meta device (the step then runs as on the CPU). Afterwards everything is restored, even if the
    step raises: no real tensor is ever written to, and Python objects hold the same objects as before.

    Contents that follow from integer and boolean batches, small tensors and buffers are known, so masks and lengths are
    the true ones. Only trials allocate memory: an operator with unknown scratch memory is run once on its own if its
    arguments have at most 64 MiB; otherwise it is listed in `unknown`.

    Args:
        model: The model that the step trains.
        step: Runs forward and backward of `model`, and optionally the optimizer.
        batch: The argument of `step`.
        device: A GPU, by name or as a GpuSpec, or several, "8 x h100-80", one for each process of the process group;
            if None, the step is estimated on the model's own device.
        plan: The plan under which the step runs.
        optimizer: Needed only if neither the step nor the model refers to it.
        allocator: Settings of the CUDA caching allocator, by default the environment's; only with `device`.

    Returns:
        The estimate: `peak_bytes`, the timeline, and the operators whose scratch memory is unknown.

    Raises:
        DataDependentStepError: If the step branches on contents of other tensors; the error names the line.
        RehearsalError: If the step can't be rehearsed.
        StalePlan: If the plan is for another model.

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
    check_step(model, step, batch)
    check_estimated(model.modules())
    if device is not None:
        from lowtide.estimator.cuda.absent_gpu_run import estimate_on  # imported only for estimates on a GPU

        gpu, n = parse_gpus(device)
        return estimate_on(gpu, model, step, batch, plan=plan, optimizer=optimizer, allocator=allocator, n_gpus=n or 1)
    engine = planned(model, plan, device_of(model).replace("meta", "cpu"))
    with enable_plan_levers(plan, model, optimizer), TwoStepRun(model, batch, (step, optimizer), engine=engine) as run:
        hand_back = make_container_restorer(batch)
        step(batch)
        hand_back()
        run.second()
        step(batch)
        run.finish()
    return run.estimate()
