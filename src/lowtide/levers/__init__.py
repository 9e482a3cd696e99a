"""Levers: changes of the training step itself that lower its peak, each with its bytes and its cost.

What a lever does to memory is measured, not modelled: the step is rehearsed with the lever on, which gives another
profile, and every plan made from that profile has the lever in it (`selection.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lowtide.errors import LowtideError
from lowtide.levers.chunked_loss import LossHead
from lowtide.levers.fused_optimizer import FusedOptimizer
from lowtide.levers.lever import ActiveLever, Lever, LeverNotApplicable
from lowtide.levers.loss_only_outputs import Outputs
from lowtide.levers.micro_batches import MicroBatches
from lowtide.levers.optimizer_in_backward import StepInBackward
from lowtide.levers.products_apart import ProductsApart
from lowtide.planner.records import AppliedLever
from lowtide.runtime.fingerprint import Optimizers, listed
from lowtide.utils.removable import Removable

if TYPE_CHECKING:
    from torch import nn

    from lowtide.planner.records import Plan

_ALL: tuple[Lever, ...] = (Outputs(), FusedOptimizer(), ProductsApart(), LossHead(), StepInBackward(), MicroBatches())

LEVERS = {lever.name: lever for lever in _ALL}
"""All levers by name, in the order in which they are tried: those that cost least come first."""

DEFAULT = ("outputs",)
"""What needs nobody's word: exact, and noticed by nobody."""


class LeverStack(Removable):
    """Several levers that are on. `remove()` takes them off again."""

    def __init__(self, undo: contextlib.ExitStack, on: tuple[ActiveLever, ...]) -> None:
        self._undo, self._on = undo, on

    def check(self) -> None:
        """After steps with them: raises NoUse if one changed nothing in them, or may not stay on."""
        for each in self._on:
            each.check()

    def remove(self) -> None:
        """Model and optimizer are as before. May be called again."""
        self._undo.close()


def enable(model: nn.Module, levers: Iterable[AppliedLever], optimizer: Optimizers) -> LeverStack:
    """Put these levers on, the first one innermost. Raises NoUse if one can't be put on; then none is.

    One that changes the optimizer changes a single one.
    """
    optimizers = listed(optimizer)
    one = optimizers[0] if len(optimizers) == 1 else None
    with contextlib.ExitStack() as undo:
        on = []
        for pulled in levers:
            each = named(pulled.name).enable(model, one, pulled.settings)
            undo.callback(each.remove)
            on.append(each)
        return LeverStack(undo.pop_all(), tuple(on))


def of_plan(plan: Plan | None, model: nn.Module, optimizer: Optimizers) -> LeverStack:
    """Put a plan's levers on; without a plan there are none. Raises LowtideError if one can't be put on."""
    try:
        return enable(model, () if plan is None else plan.levers, optimizer)
    except LeverNotApplicable as why:
        raise LowtideError(f"a lever of this plan can't be put on: {why}.") from why


def in_script(text: str) -> AppliedLever:
    """A lever for the model of a script, as a command line names it: `loss head`, `micro-batches=4`.

    Raises LowtideError if there is none of that name, or if it is for an optimizer, which nobody knows before it steps.
    """
    name, _, number = text.partition("=")
    lever = named(name)
    if lever.wants_optimizer:
        raise LowtideError(f"the lever {name!r} changes the optimizer: use lowtide.fit, or change it in the script.")
    if lever.name == ProductsApart.name:
        raise LowtideError(
            f"the lever {name!r} is for models that are compiled as a whole: use lowtide.fit in the script."
        )
    takes_number = lever.name == MicroBatches.name
    if takes_number != number.isdigit() or number == "0":
        wanted = "a number of pieces, as in micro-batches=4" if takes_number else "no number"
        raise LowtideError(f"the lever {name!r} takes {wanted}; found {text!r}.")
    settings = {"n": float(number)} if takes_number else {}
    return AppliedLever(name=name, what=lever.in_words(settings), exact=lever.exact, settings=settings)


def named(name: str) -> Lever:
    """The lever of that name. Raises LowtideError if there is none."""
    if name not in LEVERS:
        raise LowtideError(f"there is no lever {name!r}. There are: {', '.join(map(repr, LEVERS))}.")
    return LEVERS[name]
