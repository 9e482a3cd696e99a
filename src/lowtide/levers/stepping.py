"""The lever `step in backward`: each parameter is updated as soon as its gradient is there, which is then let go of.

So gradients never exist all at once. The bits are those of the plain step, as torch's optimizers treat each parameter
by itself. With gradient accumulation the update comes in the last backward pass before `optimizer.step()`; clipping by
value, or by each parameter's own norm, is done before it. When backward is over there are no gradients left: code that
looks at them finds None. A backward pass that fails leaves some parameters updated and others not.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lowtide import _torch
from lowtide.errors import LowtideError
from lowtide.levers.arrivals import BY_VALUE, Clip, observe
from lowtide.levers.gathering import is_gathering
from lowtide.levers.lever import NoUse, Settings, Site

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle


class StepInBackward:
    """See the top of this file."""

    name: ClassVar[str] = "step in backward"
    what: ClassVar[str] = "parameters are updated and gradients let go of while backward runs"
    exact: ClassVar[bool] = True
    hides: ClassVar[frozenset[str]] = frozenset({"gradients"})
    wants_optimizer: ClassVar[bool] = True
    free: ClassVar[bool] = True

    def settings(self, site: Site) -> Settings:
        """Backward passes before each `optimizer.step()`, and how gradients are clipped: from one step that is watched.

        Raises NoUse where gradients are needed all at once: clipping by their common norm, a GradScaler, or any other
        change between backward and step.
        """
        optimizer = _steppable(site.optimizer)
        seen = observe(site, optimizer)
        if seen.scaled:
            raise NoUse("a GradScaler looks at all gradients before each step")
        if not seen.backwards:
            raise NoUse("the optimizer does not step after a backward pass in the step")
        if seen.clip is None and seen.changed:
            raise NoUse("gradients are changed between backward and optimizer.step(), and not by clipping")
        if seen.clip is not None and seen.clip.why_not:
            raise NoUse(seen.clip.why_not)
        clipped = {} if seen.clip is None else {seen.clip.kind: seen.clip.limit, "norm_type": seen.clip.norm_type}
        return {"backwards": seen.backwards, **clipped}

    def may_save(self, site: Site, parts: Mapping[str, int]) -> int:
        """All gradients but the largest."""
        try:
            _steppable(site.optimizer)
        except NoUse:
            return 0
        return parts.get("gradients", 0)

    def put_on(self, model: nn.Module, optimizer: Optimizer | None, settings: Settings) -> _On:
        """From now on backward passes update the optimizer's parameters."""
        return _On(_steppable(optimizer), settings)


class _On:
    def __init__(self, optimizer: Optimizer, settings: Settings) -> None:
        self._optimizer = optimizer
        self._backwards = int(settings.get("backwards", 1))
        self._clip = Clip.told(settings)
        self._step = _torch.step_without_hooks(optimizer)
        self._lock = threading.Lock()
        self._arrived: dict[Tensor, int] = {}
        self._group = {p: n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
        trained = sorted((p for p in self._group if p.requires_grad), key=Tensor.numel)
        if self._clip is not None and self._clip.kind == BY_VALUE:
            del trained[:1]  # left to the loop's own calls: clip_grad_value_ fails where there are no gradients at all
        self._hooks: list[RemovableHandle] = [p.register_post_accumulate_grad_hook(self._arrives) for p in trained]
        self._hooks.append(optimizer.register_step_post_hook(self._ends))

    def _arrives(self, parameter: Tensor) -> None:
        """A backward pass has added to the parameter's gradient."""
        if is_gathering(parameter):
            return
        with self._lock:  # each card has a thread
            arrived = self._arrived[parameter] = self._arrived.get(parameter, 0) + 1
            if arrived > self._backwards:
                raise LowtideError(
                    f"the lever 'step in backward' was planned for {self._backwards} backward pass(es) before each "
                    "optimizer.step(), and there was one more: the update has been made already. If an earlier one "
                    "failed, apply the plan anew; else fit again with a step that accumulates as the loop does."
                )
            if arrived == self._backwards:
                self._update(parameter)

    def _update(self, parameter: Tensor) -> None:
        """Step on one parameter alone, as the optimizer would with all."""
        if self._clip is not None:
            self._clip.apply(parameter)
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [{**groups[self._group[parameter]], "params": [parameter]}]
        try:
            self._step()
        finally:
            self._optimizer.param_groups = groups
        parameter.grad = None

    def _ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The user's own `optimizer.step()`: by now it found gradients only where backward came less often."""
        self._arrived.clear()

    def check(self) -> None:
        """Nothing can have gone wrong that was not raised."""

    def remove(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


def _steppable(optimizer: Optimizer | None) -> Optimizer:
    """The optimizer, if it can step on one parameter at a time. Raises NoUse otherwise."""
    if optimizer is None:
        raise NoUse("no single optimizer is known that steps on the model's parameters: pass optimizer=")
    name = type(optimizer).__name__
    if not type(optimizer).__module__.startswith("torch.optim") or isinstance(optimizer, torch.optim.LBFGS):
        raise NoUse(f"a {name} may look at several parameters at once; torch.optim's, but for LBFGS, do not")
    if _torch.has_step_pre_hooks(optimizer):
        raise NoUse(f"there are hooks before the step of this {name}, which may look at gradients")
    return optimizer
