"""The lever `step in backward`: update each parameter as soon as its gradient is complete, then free the gradient.

So gradients never exist all at once. The bits are those of the plain step, because torch's optimizers treat each
parameter separately. With gradient accumulation the update comes in the last backward pass before `optimizer.step()`,
after clipping by value or by each parameter's own norm. No gradients are left when backward is over: code that reads
them finds None. A backward pass that fails leaves some parameters updated and others not. Values that a loop sets
between backward and step, such as a learning rate or the weights that SAM has moved, would come too late: such loops
are rejected, and an optimizer setting changed too late in a later step is an error.

Gradients that are clipped by their common norm are computed twice, first for the norm (`two_pass_clipping.py`). All
saved tensors stay until the second pass. `clip_grad_norm_` then finds no gradients and returns 0, so a logged norm is
wrong. A backward pass that fails in the first half updates nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lowtide._torch.modules import has_backward_hooks
from lowtide._torch.optim import find_unhooked_step, has_step_pre_hooks
from lowtide._torch.tensors import has_accumulation_hooks, has_gradient_hooks
from lowtide.errors import LowtideError, summarize
from lowtide.levers.lever import ONE_OPTIMIZER, Lever, LeverNotApplicable, Settings, StepContext
from lowtide.levers.optimizer_observer import (
    BY_COMMON_NORM,
    BY_VALUE,
    Clip,
    GroupSettings,
    ObservedStep,
    find_changed_setting,
    observe,
    read_group_settings,
)
from lowtide.levers.partial_gradients import is_gathering
from lowtide.levers.two_pass_clipping import OTHERS, CommonNorm, find_order
from lowtide.state.process_group import several_processes
from lowtide.state.step_outcome import is_out_of_memory
from lowtide.state.step_snapshot import StepSnapshot

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

TOGETHER = "several processes train together, and what the others add to a gradient comes later than the update would"


class StepInBackward(Lever):
    """The lever `step in backward`, which updates each parameter while backward runs."""

    name: ClassVar[str] = "step in backward"
    what: ClassVar[str] = "parameters are updated and gradients freed while backward runs"
    exact: ClassVar[bool] = True
    unavailable_results: ClassVar[frozenset[str]] = frozenset({"gradients"})
    wants_optimizer: ClassVar[bool] = True
    free: ClassVar[bool] = True

    def settings(self, site: StepContext) -> Settings:
        """Observe one step: find the backward passes before each `optimizer.step()`, and the clipping of gradients.

        Raises LeverNotApplicable if gradients are needed all at once: by a GradScaler, or by any change of gradients or
        parameters between backward and step except clipping. If gradients are clipped by their common norm, one more
        step runs to check that the norm can be known in time.
        """
        optimizer = _check_steppable(site.only_optimizer)
        observed = observe(site, optimizer)
        if observed.scaled:
            raise LeverNotApplicable("a GradScaler looks at all gradients before each step")
        if not observed.backwards:
            raise LeverNotApplicable("the optimizer does not step after a backward pass in the step")
        if observed.set_late:
            raise LeverNotApplicable(
                f"{observed.set_late!r} of a parameter group is set between backward and optimizer.step()"
            )
        if observed.moved:
            raise LeverNotApplicable("parameters are written to between backward and optimizer.step(), as SAM does")
        if observed.clip is None and observed.changed:
            raise LeverNotApplicable("gradients are changed between backward and optimizer.step(), and not by clipping")
        if observed.clip is not None and observed.clip.why_not:
            raise LeverNotApplicable(observed.clip.why_not)
        settings = {"backwards": float(observed.backwards), **({} if observed.clip is None else observed.clip.settings)}
        if observed.clip is not None and observed.clip.kind == BY_COMMON_NORM:
            settings["order"] = float(find_order(site.model, optimizer, observed.clip.clipped))
            _check_two_passes(site.model, observed)
            _try_two_passes(site, optimizer, settings)
        return settings

    def is_free(self, settings: Settings) -> bool:
        """Return True unless the settings make backward compute the gradients twice, for clipping by a common norm."""
        return BY_COMMON_NORM not in settings

    def put_in_words(self, settings: Settings) -> str:
        return (
            self.what if self.is_free(settings) else f"{self.what}; gradients are computed twice, first for their norm"
        )

    def estimate_saving(self, site: StepContext, parts: Mapping[str, int]) -> int:
        """Estimate the saving in bytes: all gradients at the peak."""
        try:
            _check_steppable(site.only_optimizer)
        except LeverNotApplicable:
            return 0
        return parts.get("gradients", 0)

    def enable(self, model: nn.Module, optimizer: Optimizer | None, settings: Settings) -> _Active:
        """Make backward passes update the optimizer's parameters."""
        return _Active(model, _check_steppable(optimizer), settings)


class _Active:
    def __init__(self, model: nn.Module, optimizer: Optimizer, settings: Settings, *, on_trial: bool = False) -> None:
        self._optimizer = optimizer
        self._backwards = int(settings.get("backwards", 1))
        clip = Clip.from_settings(settings)
        self._clip: Clip | CommonNorm | None = clip
        self._step = find_unhooked_step(optimizer)
        self._lock = threading.Lock()
        self._arrived: dict[Tensor, int] = {}
        self._settings: list[GroupSettings] = []
        """Settings of the parameter groups with which this step's parameters are updated."""
        self._group = {p: n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
        trained = sorted((p for p in self._group if p.requires_grad), key=Tensor.numel)
        if clip is not None and clip.kind == BY_VALUE:
            del trained[:1]  # left to the loop's own calls: clip_grad_value_ fails without any gradient
        if clip is not None and clip.kind == BY_COMMON_NORM:
            self._clip = CommonNorm(model, optimizer, clip, int(settings.get("order", 0)), on_trial=on_trial)
        self._hooks: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(self._count_gradient) for p in trained
        ]
        self._hooks.append(optimizer.register_step_post_hook(self._finish_step))

    def _count_gradient(self, parameter: Tensor) -> None:
        """Count a backward pass that has added to the parameter's gradient; update the parameter after the last one."""
        if is_gathering(parameter) or (
            isinstance(self._clip, CommonNorm) and self._clip.take_first_gradient(parameter)
        ):
            return
        if several_processes():  # a backward pass may have started after the lever was enabled
            raise LowtideError(f"the lever 'step in backward' can't stay on: {TOGETHER}. Fit without it.")
        with self._lock:  # backward has a thread for each GPU
            arrived = self._arrived[parameter] = self._arrived.get(parameter, 0) + 1
            if arrived > self._backwards:
                raise LowtideError(
                    f"the lever 'step in backward' was planned for {self._backwards} backward pass(es) before each "
                    "optimizer.step(), and there was one more, after the update. If an earlier one failed, apply the "
                    "plan again; else fit again with a step that accumulates as the loop does."
                )
            if arrived == self._backwards:
                self._update(parameter)

    def _update(self, parameter: Tensor) -> None:
        """Run the optimizer's step on one parameter alone, and free its gradient."""
        if self._clip is not None:
            self._clip.apply(parameter)
        self._settings = self._settings or read_group_settings(self._optimizer)
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [{**groups[self._group[parameter]], "params": [parameter]}]
        try:
            self._step()
        finally:
            self._optimizer.param_groups = groups
        parameter.grad = None

    def _finish_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Reset the lever's state after the optimizer's step.

        Raises LowtideError if a setting of a parameter group was changed between backward and this step.
        """
        self._arrived.clear()
        settings, self._settings = self._settings, []
        if settings and (name := find_changed_setting(settings, read_group_settings(optimizer))):
            raise LowtideError(
                f"{name!r} of a parameter group was set between backward and optimizer.step(). By then the lever "
                "'step in backward' had already updated the parameters, with the previous value. Set it before "
                "backward, or fit without the lever."
            )
        if isinstance(self._clip, CommonNorm):
            self._clip.finish_step()

    def check(self) -> None:
        if not isinstance(self._clip, CommonNorm):
            return
        if not self._clip.n_known_steps:
            raise LeverNotApplicable("the common norm of the gradients was never known in time")
        if self._clip.differed:
            raise LeverNotApplicable(f"gradients are clipped by their common norm, and {OTHERS}")
        if self._clip.changed:
            raise LeverNotApplicable(
                f"gradients have to be computed for their common norm first, which changes {self._clip.changed}"
            )

    def remove(self) -> None:
        if isinstance(self._clip, CommonNorm):
            self._clip.remove()
            self._clip = None
        while self._hooks:
            self._hooks.pop().remove()


def _check_steppable(optimizer: Optimizer | None) -> Optimizer:
    """Return `optimizer`. Raises LeverNotApplicable if it can't step on one parameter at a time."""
    if several_processes():
        raise LeverNotApplicable(TOGETHER)
    if optimizer is None:
        raise LeverNotApplicable(ONE_OPTIMIZER)
    name = type(optimizer).__name__
    if not type(optimizer).__module__.startswith("torch.optim") or isinstance(optimizer, torch.optim.LBFGS):
        raise LeverNotApplicable(
            f"{name} may read several parameters at once; optimizers of torch.optim, except LBFGS, do not"
        )
    if has_step_pre_hooks(optimizer):
        raise LeverNotApplicable(f"there are hooks before the step of this {name}, which may look at gradients")
    return optimizer


def _check_two_passes(model: nn.Module, observed: ObservedStep) -> None:
    """Check that gradients can be computed twice: no hook sees them, and they are not accumulated over several passes.

    Raises LeverNotApplicable otherwise.
    """
    if observed.backwards > 1:
        raise LeverNotApplicable(
            "gradients are clipped by their common norm and accumulated over several backward passes: all gradients "
            "exist before the last pass"
        )
    twice = "which would run twice: gradients that are clipped by their common norm have to be computed for it first"
    named = model.named_parameters()
    hooked = next((n for n, p in named if has_gradient_hooks(p) or has_accumulation_hooks(p)), None)
    if hooked is not None:
        raise LeverNotApplicable(f"there is a hook on the gradient of {hooked}, {twice}")
    if observed.hooked or any(map(has_backward_hooks, model.modules())):
        raise LeverNotApplicable(f"there are hooks on gradients in the step, {twice}")


def _try_two_passes(site: StepContext, optimizer: Optimizer, settings: Settings) -> None:
    """Run the step with the lever on, then restore all state. Raises LeverNotApplicable if the step fails."""
    with StepSnapshot(site.model, site.batch, optimizer, site.step):
        on = _Active(site.model, optimizer, settings, on_trial=True)
        try:
            site.step(site.batch)
            on.check()
        except LowtideError as error:
            raise LeverNotApplicable(
                f"gradients are clipped by their common norm, and {str(error).removesuffix('.')}"
            ) from error
        except Exception as error:  # the step ran without the lever
            if is_out_of_memory(error):
                raise
            raise LeverNotApplicable(
                f"the step fails where gradients are computed twice: {summarize(error)}"
            ) from error
        finally:
            on.remove()
