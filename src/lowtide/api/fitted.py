"""Find and remove the plans in force on a model, even if no variable refers to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lowtide.api.apply import Applied, find_plan_holders
from lowtide.api.shape_buckets.dispatch import Switched
from lowtide.errors import LowtideError
from lowtide.profiler.preconditions import check_is_module
from lowtide.runtime.composite_model import find_name
from lowtide.runtime.planned_engine import planned_engine
from lowtide.utils.removable import Removable

if TYPE_CHECKING:
    from torch import nn


def fitted(model: nn.Module) -> Removable | None:
    """Return the plan in force on `model`, or on a module inside it if `model` is a wrapper; None if there is none.

    Args:
        model: A module, or a wrapper of it such as DistributedDataParallel.

    Returns:
        The Fitted object that `fit` returned, or the Applied object of `apply` and `within`.

    Example:
        >>> import torch, lowtide
        >>> model = torch.nn.Linear(8, 8)
        >>> lowtide.fitted(model) is None
        True
    """
    return next(_holders(model), None)


def remove(model: nn.Module) -> None:
    """Remove every plan in force on `model` and on modules inside it, which restores all of them.

    Args:
        model: A module, or a wrapper of it such as DistributedDataParallel.

    Raises:
        LowtideError: If no plan is in force on any of them.

    Example:
        >>> import torch, lowtide
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> batch = torch.ones(128, 64)
        >>> def step(batch):
        ...     model(batch).square().mean().backward()
        >>> plan = lowtide.plan(lowtide.rehearse(model, step, batch), "90%")
        >>> applied = lowtide.apply(model, plan)
        >>> lowtide.remove(model)
        >>> lowtide.fitted(model) is None
        True
    """
    holders = [*_holders(model)]
    if not holders:
        raise LowtideError(
            f"no plan is in force on this {type(model).__name__}, nor on a module inside it: there is nothing to "
            "remove. Give the model that lowtide.fit was given, or a wrapper of it; a copy has no plan."
        )
    for holder in holders:
        holder.remove()


def check_has_no_plan(model: nn.Module) -> None:
    """Raise LowtideError if a plan is in force on `model`, on a module inside it, or on a larger model that contains
    it.
    """
    check_is_module(model)
    for path, module in model.named_modules():
        if any(isinstance(owner, Applied | Switched) for owner in find_plan_holders(module)):
            where = f"its {path} ({type(module).__name__})" if path else "it"
            raise LowtideError(
                f"{type(model).__name__} can't be fitted: there is a plan in force on {where} already. Remove it "
                "first with lowtide.remove(model); lowtide.fitted(model) returns it."
            )
    if (engine := planned_engine(model)) is not None:
        whole = find_name(engine.model)
        raise LowtideError(
            f"this {type(model).__name__} can't be fitted: it is a part of {whole}, on which a plan is in force. "
            f"Remove that plan first: give that {whole} to lowtide.remove."
        )


def _holders(model: nn.Module) -> Iterator[Removable]:
    check_is_module(model)
    return (
        owner.holder
        for module in model.modules()
        for owner in find_plan_holders(module)
        if isinstance(owner, Applied | Switched)
    )
