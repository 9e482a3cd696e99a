"""Levers: changes of the training step that lower its peak, each with its bytes and its cost.

A lever's effect on memory is measured, not modelled: the step is rehearsed with the lever on, which gives another
profile, and every plan made from that profile contains the lever (`selection.py`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lowtide.errors import LowtideError
from lowtide.levers.chunked_loss import LossHead
from lowtide.levers.fused_optimizer import FusedOptimizer
from lowtide.levers.lever import ActiveLever, Lever, LeverNotApplicable
from lowtide.levers.loss_only_outputs import Outputs
from lowtide.levers.micro_batches import MicroBatches
from lowtide.levers.optimizer_in_backward import StepInBackward
from lowtide.levers.unfused_addmm import UnfusedAddmm
from lowtide.planner.records import AppliedLever
from lowtide.runtime.live_optimizers import Optimizers, listed
from lowtide.utils.removable import Removable

if TYPE_CHECKING:
    from torch import nn

    from lowtide.planner.records import Plan

_ALL: tuple[Lever, ...] = (
    Outputs(),
    FusedOptimizer(),
    UnfusedAddmm(),
    LossHead(),
    StepInBackward(),
    MicroBatches(),
)

LEVERS = {lever.name: lever for lever in _ALL}
"""All levers by name, in the order in which they are tried: cheapest first."""

DEFAULT = ("outputs",)
"""Levers enabled by default: exact, and invisible to the training step."""


class LeverStack(Removable):
    """Levers (changes of the training step that save memory) that are on together. `remove()` turns them off."""

    def __init__(self, undo: contextlib.ExitStack, on: tuple[ActiveLever, ...]) -> None:
        self._undo, self._levers = undo, on

    def check(self) -> None:
        """Check, after one or more steps with the levers on, that each lever took effect and may stay on.

        Raises LeverNotApplicable if a lever changed nothing in the steps, or must not stay on.
        """
        for lever in self._levers:
            lever.check()

    def remove(self) -> None:
        """Turn all levers off, which restores model and optimizer. Repeated calls do nothing."""
        self._undo.close()


def enable(model: nn.Module, levers: Iterable[AppliedLever], optimizer: Optimizers) -> LeverStack:
    """Turn on `levers` in their order; hooks of a later lever run around those of an earlier one.

    A lever that changes the optimizer needs exactly one optimizer. Raises LeverNotApplicable if a lever can't be turned
    on; then all stay off.
    """
    optimizers = listed(optimizer)
    only_optimizer = optimizers[0] if len(optimizers) == 1 else None
    with contextlib.ExitStack() as undo:
        on = []
        for applied in levers:
            active = find_lever(applied.name).enable(model, only_optimizer, applied.settings)
            undo.callback(active.remove)
            on.append(active)
        return LeverStack(undo.pop_all(), tuple(on))


def enable_plan_levers(plan: Plan | None, model: nn.Module, optimizer: Optimizers) -> LeverStack:
    """Turn on the levers of `plan`; none if `plan` is None. Raises LowtideError if a lever can't be turned on."""
    try:
        return enable(model, () if plan is None else plan.levers, optimizer)
    except LeverNotApplicable as why:
        raise LowtideError(f"a lever of this plan can't be applied: {why}.") from why


def parse_script_lever(text: str) -> AppliedLever:
    """Parse a lever on the command line, such as `loss head` or `micro-batches=4`.

    Raises LowtideError for an unknown name, a missing or unexpected number, a lever for models compiled as a whole, and
    a lever that changes the optimizer: a script's optimizer is unknown before it steps.
    """
    name, _, number = text.partition("=")
    lever = find_lever(name)
    if lever.wants_optimizer:
        raise LowtideError(f"the lever {name!r} changes the optimizer: use lowtide.fit, or change it in the script.")
    if lever.needs_whole_compile:
        raise LowtideError(
            f"the lever {name!r} is for models that are compiled as a whole: use lowtide.fit in the script."
        )
    if not re.fullmatch(r"0*[1-9][0-9]{,8}" if lever.takes_number else "", number):
        wanted = f"a number of pieces, as in {name}=4" if lever.takes_number else "no number"
        raise LowtideError(f"the lever {name!r} takes {wanted}; found {text!r}.")
    settings = {"n": float(number)} if lever.takes_number else {}
    return AppliedLever(name=name, what=lever.put_in_words(settings), exact=lever.exact, settings=settings)


def find_lever(name: str) -> Lever:
    """Return the lever called `name`. Raises LowtideError if there is none."""
    if name not in LEVERS:
        raise LowtideError(f"there is no lever {name!r}. There are: {', '.join(map(repr, LEVERS))}.")
    return LEVERS[name]
