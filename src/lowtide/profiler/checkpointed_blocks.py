"""Blocks that use torch.utils.checkpoint themselves: plans leave them unchanged, and a note states the cost of that."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from lowtide._torch.backward import observe_checkpointed_calls
from lowtide.planner.planning import smallest_peak
from lowtide.planner.records import CHECKPOINTED
from lowtide.profiler.repeated_blocks import repeated_blocks
from lowtide.runtime.fingerprint import place_of
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from torch import nn

    from lowtide.planner.records import Profile


def without_checkpoints() -> AbstractContextManager[None]:
    """Disable torch.utils.checkpoint inside this `with` block: the same bits, and every tensor saved."""
    return observe_checkpointed_calls(lambda: None, off=True)


def can_do_without(model: nn.Module) -> bool:
    """Return True if it is safe for the process to run a step that saves every tensor.

    Running out of memory on a CPU may end the process; with repeated blocks a frugal audit needs no more memory than
    checkpointing does.
    """
    return place_of(model).type != "cpu" or bool(repeated_blocks(model))


def with_checkpoint_note(profile: Profile, checkpointed: Counter[str], without: Profile | None) -> Profile:
    """Return `profile` with a note on the `checkpointed` calls.

    Args:
        profile: Profile of the step with its checkpoints.
        checkpointed: Number of checkpointed calls by path of the module.
        without: Profile of the step without checkpoints, if it could be rehearsed.
    """
    if not checkpointed:
        return profile
    n_calls = checkpointed.total()
    where = ", ".join(path or "the model" for path in list(checkpointed)[:3]) + ", ..." * (len(checkpointed) > 3)
    calls, checkpoint = (
        ("a call", "checkpoints itself") if n_calls == 1 else (f"{n_calls} calls", "checkpoint themselves")
    )
    note = f"{calls} in {where} {checkpoint} ({CHECKPOINTED}), which plans leave as it is"
    if without is None:
        note += ": rehearse without that to see what a plan for it needs"
    else:
        now, then = smallest_peak(profile)[1].peak_bytes, smallest_peak(without)[1].peak_bytes
        note += (
            f": without that the smallest peak would be {format_bytes(then)} instead of {format_bytes(now)}. To do "
            "without, leave out the checkpointing (in transformers: gradient_checkpointing_disable())"
        )
    return replace(profile, notes=(*profile.notes, note))
