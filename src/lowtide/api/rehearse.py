"""`lowtide.rehearse`: take a step on trial and return its profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lowtide import profiler as rehearsal
from lowtide.runtime.fingerprint import Optimizers
from lowtide.state.observed_changes import not_put_back
from lowtide.state.reachable_objects import looking_on
from lowtide.state.step_arguments import of_one_argument

if TYPE_CHECKING:
    from torch import nn

    from lowtide.planner.records import Profile


def rehearse(
    model: nn.Module,
    step: Callable[..., Any],
    batch: Any,
    *,
    optimizer: Optimizers = None,
    in_place: bool = True,
) -> Profile:
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

    Raises RehearsalError for a step that can't be planned or estimated, with the reason.
    """
    step = of_one_argument(step, batch)
    changes = looking_on(model, step, batch)
    profile = rehearsal.rehearse(model, step, batch, optimizer=optimizer, in_place=in_place)
    found = changes()
    return replace(profile, notes=(*profile.notes, not_put_back(found))) if found else profile
