"""Blocks that checkpoint themselves: plans leave them unchanged, and a note states the cost of that.

Most blocks use `torch.utils.checkpoint`, which can be disabled to find that cost. Other blocks have a
`torch.autograd.Function` of their own that calls modules again in its backward, as in models derived from OpenAI's
guided-diffusion.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lowtide.planner.planning import find_smallest_peak
from lowtide.planner.records import CALLED_AGAIN, CHECKPOINTED
from lowtide.profiler.repeated_blocks import repeated_blocks
from lowtide.runtime.fingerprint import find_device
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from torch import nn

    from lowtide.planner.records import Profile


@dataclass(slots=True)
class CheckpointedCalls:
    """Calls of a step that run again in its backward."""

    by_torch: Counter[str] = field(default_factory=Counter)
    """Number of torch.utils.checkpoint calls by path of the module that they run in."""
    by_functions: dict[type, list[str]] = field(default_factory=dict)
    """Paths of the outermost modules that each Function of the program calls in its backward."""

    def add(self, function: type, path: str) -> None:
        """Add a call of the module at `path` in the backward of `function`."""
        paths = self.by_functions.setdefault(function, [])
        if not any(path == outer or path.startswith(f"{outer}.") for outer in paths):
            paths.append(path)


def can_do_without(model: nn.Module) -> bool:
    """Return True if a step of the model without its checkpoints can't end the process by running out of memory.

    Running out of memory on a CPU may end the process. If the model has repeated blocks, a frugal audit needs no more
    memory than checkpointing does.
    """
    return find_device(model).type != "cpu" or bool(repeated_blocks(model))


def with_checkpoint_notes(profile: Profile, checkpointed: CheckpointedCalls, without: Profile | None) -> Profile:
    """Return `profile` with notes on the `checkpointed` calls.

    Args:
        profile: Profile of the step with its checkpoints.
        checkpointed: The calls that run again in backward.
        without: Profile of the step without torch.utils.checkpoint, if it could be rehearsed.
    """
    notes = [
        f"{function.__qualname__} of {function.__module__} {CALLED_AGAIN} ({_first(paths)}), which plans leave as it "
        "is. If that is checkpointing, turn it off and rehearse again to see what a plan needs instead"
        for function, paths in checkpointed.by_functions.items()
    ]
    if checkpointed.by_torch:
        notes.append(_note(profile, checkpointed.by_torch, without))
    return replace(profile, notes=(*profile.notes, *notes))


def _note(profile: Profile, checkpointed: Counter[str], without: Profile | None) -> str:
    n_calls = checkpointed.total()
    where = _first([path or "the model" for path in checkpointed])
    calls, checkpoint = (
        ("a call", "checkpoints itself") if n_calls == 1 else (f"{n_calls} calls", "checkpoint themselves")
    )
    note = f"{calls} in {where} {checkpoint} ({CHECKPOINTED}), which plans leave as it is"
    if without is None:
        return f"{note}: rehearse without that to see what a plan for it needs"
    now, then = find_smallest_peak(profile)[1].peak_bytes, find_smallest_peak(without)[1].peak_bytes
    return (
        f"{note}: without that the smallest peak would be {format_bytes(then)} instead of {format_bytes(now)}. To do "
        "without, leave out the checkpointing (in transformers: gradient_checkpointing_disable())"
    )


def _first(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + ", ..." * (len(paths) > 3)
