"""The lever `fused optimizer`: torch's fused kernels, which update parameters without temporaries.

`foreach`, the default on GPUs, needs about one more copy of the parameters during the step; the plain loop needs a copy
of the largest parameter. The arithmetic is the same except for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lowtide.levers.lever import ONE_OPTIMIZER, Lever, LeverNotApplicable, Settings, StepContext

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_CHOICES = ("fused", "foreach")


class FusedOptimizer(Lever):
    """The lever `fused optimizer`, which makes the optimizer use its fused kernels, not `foreach` or the plain loop."""

    name: ClassVar[str] = "fused optimizer"
    what: ClassVar[str] = "the optimizer's fused kernels, without temporaries"
    exact: ClassVar[bool] = False
    unavailable_results: ClassVar[frozenset[str]] = frozenset()
    wants_optimizer: ClassVar[bool] = True
    free: ClassVar[bool] = True
    is_repeatable: ClassVar[bool] = True

    def settings(self, site: StepContext) -> Settings:
        """Return an empty dict. Raises LeverNotApplicable for an optimizer that is fused already or can't be."""
        _check_fusible(site.only_optimizer)
        return {}

    def estimate_saving(self, site: StepContext, parts: Mapping[str, int]) -> int:
        """Estimate the saving in bytes: the temporaries of the optimizer's step, at most one copy of the parameters.

        Returns 0 if the peak is not in the optimizer's step.
        """
        try:
            _check_fusible(site.only_optimizer)
        except LeverNotApplicable:
            return 0
        in_step = not (parts.get("activations") or parts.get("loss head"))
        return min(parts.get("temporaries", 0), parts.get("parameters", 0)) if in_step else 0

    def enable(self, model: nn.Module, optimizer: Optimizer | None, settings: Settings) -> _Active:
        """Make `optimizer` step with its fused kernels."""
        return _Active(_check_fusible(optimizer))


class _Active:
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before: list[dict[str, Any]] = [
            {name: group[name] for name in _CHOICES if name in group} for group in optimizer.param_groups
        ]
        for group in optimizer.param_groups:
            group.update(fused=True, foreach=False)
        _move_steps(optimizer, to_device=True)

    def check(self) -> None:
        """Do nothing: a fused optimizer needs no check after steps."""

    def remove(self) -> None:
        before, self._before = self._before, []
        for group, choices in zip(self._optimizer.param_groups, before, strict=False):  # groups added since stay
            for name in _CHOICES:
                group.pop(name, None)
            group.update(choices)
        if before:
            _move_steps(self._optimizer, to_device=False)


def _check_fusible(optimizer: Optimizer | None) -> Optimizer:
    """Return `optimizer`. Raises LeverNotApplicable if torch's fused kernels can't replace its kernels."""
    if optimizer is None:
        raise LeverNotApplicable(ONE_OPTIMIZER)
    groups = optimizer.param_groups
    name = type(optimizer).__name__
    if not all("fused" in group for group in groups):
        raise LeverNotApplicable(f"torch has no fused {name}")
    if all(group["fused"] for group in groups):
        raise LeverNotApplicable(f"this {name} is fused already")
    if any(group.get("differentiable") or group.get("capturable") for group in groups):
        raise LeverNotApplicable(f"this {name} is differentiable or capturable")
    if not all(parameter.is_floating_point() for group in groups for parameter in group["params"]):
        raise LeverNotApplicable("fused kernels take real numbers only")
    return optimizer


def _move_steps(optimizer: Optimizer, *, to_device: bool) -> None:
    """Move the optimizer's step counts to their parameters' devices, where fused kernels read them, or to the CPU."""
    for parameter, state in optimizer.state.items():
        count = state.get("step")
        if isinstance(count, torch.Tensor):
            device = parameter.device if to_device else torch.device("cpu")
            state["step"] = count.to(device)
