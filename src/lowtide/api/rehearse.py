"""`lowtide.rehearse`: run a step on trial and return its profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lowtide import profiler as rehearsal
from lowtide.runtime.live_optimizers import Optimizers
from lowtide.state.observed_changes import describe_unrestored
from lowtide.state.reachable_objects import observe_changes
from lowtide.state.step_arguments import accept_batch
from lowtide.utils.progress import showing

if TYPE_CHECKING:
    from torch import nn

    from lowtide.memory.gpu_specs import GpuSpec
    from lowtide.planner.records import Profile


def rehearse(
    model: nn.Module,
    step: Callable[..., Any],
    batch: Any,
    *,
    optimizer: Optimizers = None,
    in_place: bool = True,
    progress: bool = True,
    device: str | GpuSpec | None = None,
) -> Profile:
    """Run `step(batch)` on trial; measure its memory, and the cost of freeing each saved tensor early.

    With `device` the step is run twice on fake tensors, as for `lowtide.estimate`. Nothing can be compared or timed
    then: recomputes are assumed to be exact (`lowtide run --plan` checks them), and times are computed.

    The step is run five times, on a GPU seven times, for real, on the model's device. A step that draws numbers from
    `random` or NumPy is run up to four times more, to see if they decide which modules run. Afterwards, also after an
    error, parameters, gradients, buffers, optimizer state, batch and random number generators are restored; so are
    other modules, tensors, schedulers and gradient scalers that the step's code refers to, and numbers, strings and
    containers of that code. The profile notes how far iterators, files and data sets have advanced. A step that runs
    out of memory is tried again under the plan with the smallest peak, and the peak of the plain step is then a
    prediction.

    Args:
        model: The model, on its device.
        step: Runs forward and backward of `model`, and optionally the optimizer. It is called with the batch, or with
            the items of a tuple or list as separate arguments.
        batch: The batch, in any nesting of containers.
        optimizer: Needed only if it has stepped on parameters outside `model` before. Optimizers that `step` calls are
            detected. Optimizers of `model` that `step` does not call are stepped after it, so that the memory of their
            update counts; this is undone, too.
        in_place: If False, no plan made from the profile lets a backward kernel overwrite an incoming gradient with the
            gradient computed from it, and no kernel for this is registered where torch would look for it
            (docs/process.md).
        progress: If False, no bar is shown on stderr; the log named "lowtide" has a line for each stage.
        device: A GPU that the machine need not have, or several such GPUs: "H100-80", "8 x H100-80".

    Returns:
        The profile that plans are made from.

    Raises:
        RehearsalError: If the step can't be planned or estimated; the error has the reason.

    Example:
        >>> import torch, lowtide
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> batch = torch.ones(128, 64)
        >>> def step(batch):
        ...     model(batch).square().mean().backward()
        >>> profile = lowtide.rehearse(model, step, batch)
        >>> profile.static.parameters, profile.measured_plain_peak_bytes
        (132352, 789256)
    """
    step = accept_batch(step, batch)
    if device is not None:
        from lowtide.estimator.fake_rehearsal import rehearse_on  # imported only for GPUs that need not exist

        return rehearse_on(device, model, step, batch, optimizer=optimizer)
    changes = observe_changes(model, step, batch)
    with showing(progress):
        profile = rehearsal.rehearse(model, step, batch, optimizer=optimizer, in_place=in_place)
    unrestored = changes()
    return replace(profile, notes=(*profile.notes, describe_unrestored(unrestored))) if unrestored else profile
