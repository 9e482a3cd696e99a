"""`lowtide.rehearse`: on the machine at hand, or for a card that is not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

from lowtide import profiler as rehearsal
from lowtide.errors import LowtideError
from lowtide.estimator import foresee
from lowtide.runtime.fingerprint import Optimizers, listed
from lowtide.state.observed_changes import not_put_back
from lowtide.state.reachable_objects import looking_on
from lowtide.state.step_arguments import of_one_argument

if TYPE_CHECKING:
    from torch import nn

    from lowtide.estimator.cuda.gpu_estimate import CardForesight
    from lowtide.memory.gpu_specs import Card
    from lowtide.planner.records import Profile


@overload
def rehearse(
    model: nn.Module,
    step: Callable[..., Any],
    batch: Any,
    *,
    optimizer: Optimizers = None,
    in_place: bool = True,
) -> Profile: ...


@overload
def rehearse(
    model: nn.Module,
    step: Callable[..., Any],
    batch: Any,
    *,
    device: str | Card,
    optimizer: Optimizers = None,
) -> CardForesight: ...


def rehearse(
    model: nn.Module,
    step: Callable[..., Any],
    batch: Any,
    *,
    device: str | Card | None = None,
    optimizer: Optimizers = None,
    in_place: bool = True,
) -> Profile | CardForesight:
    """Run `step(batch)` on trial: where does its memory go, and what would it cost to do without each part?

    `step` runs forward and backward of `model`, and the optimizer if it likes. It is run five times, for real, on the
    device that the model is on, and gives the Profile that plans are made of. Afterwards parameters, gradients,
    buffers, optimizer state, batch and random numbers are as they were, also if it raises; so are other modules,
    tensors, schedulers and gradient scalers that its code refers to, and numbers, words and containers of its own. How
    far iterators, files and data sets have gone on is noted in the profile. Optimizers that step are noticed, and those
    of `model` that don't update it after the step, which is undone; name one only if it has stepped on parameters
    outside of `model` before. If the step runs out of memory it is tried again under the most saving plan, and the peak
    of the plain step is then a prediction.

    Unless `in_place`, no plan that is made of the profile writes a gradient over the one that it is computed from, and
    no kernel is put where torch would look for it (docs/process.md).

    With `device`, the name of a CUDA card that need not be there ("rtx 4090", "a100-40", "cuda:24GiB"), the step is
    run on fake tensors instead, and the result says what it needs there and whether it fits: the same as
    `lowtide.foresee(..., device=...)`.

    Raises RehearsalError for a step that can't be planned or foreseen, with the reason.
    """
    step = of_one_argument(step, batch)
    if device is not None:
        if len(listed(optimizer)) > 1:
            raise LowtideError("with device= there is one optimizer= at most: those that the step refers to are found.")
        return foresee(model, step, batch, device=device, optimizer=next(iter(listed(optimizer)), None))
    changes = looking_on(model, step, batch)
    profile = rehearsal.rehearse(model, step, batch, optimizer=optimizer, in_place=in_place)
    found = changes()
    return replace(profile, notes=(*profile.notes, not_put_back(found))) if found else profile
