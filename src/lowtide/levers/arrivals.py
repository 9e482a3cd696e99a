"""What happens to gradients between backward and `optimizer.step()`, found out by watching one step.

Clipping is recognized by the functions of torch that do it, however they were imported; any other change by the
versions of the gradients.
"""

from __future__ import annotations

import contextlib
import cProfile
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from lowtide import _torch
from lowtide.levers.lever import Settings, Site
from lowtide.rehearsal.unchanged import Unchanged

if TYPE_CHECKING:
    from torch.optim import Optimizer

BY_VALUE, BY_NORM = "clip_value", "clip_norm"


@dataclass(frozen=True, slots=True)
class Clip:
    """How each gradient is clipped by itself."""

    kind: str
    limit: float
    norm_type: float = 2.0
    why_not: str = ""
    """Why that can't be done parameter by parameter."""

    @classmethod
    def told(cls, settings: Settings) -> Self | None:
        """The clipping that a lever's settings name."""
        for kind in (BY_VALUE, BY_NORM):
            if kind in settings:
                return cls(kind, settings[kind], settings.get("norm_type", 2.0))
        return None

    def apply(self, parameter: Tensor) -> None:
        """Clip one parameter's gradient, with the function that the loop clips it with."""
        if self.kind == BY_VALUE:
            clip_grad.clip_grad_value_(parameter, self.limit)
        else:
            clip_grad.clip_grad_norm_(parameter, self.limit, self.norm_type)


@dataclass(slots=True)
class Seen:
    """What was seen in one step."""

    backwards: int = 0
    """Most backward passes that added to one parameter's gradient before a step of the optimizer."""
    scaled: bool = False
    changed: bool = False
    clip: Clip | None = None
    _calls: list[tuple[str, float, float, frozenset[int]]] = field(default_factory=list)


def observe(site: Site, optimizer: Optimizer) -> Seen:
    """Run the step once and watch its gradients. Everything is as it was afterwards."""
    seen = Seen()
    arrived: dict[Tensor, int] = {}
    versions: dict[Tensor, tuple[int, int]] = {}

    def arrives(parameter: Tensor) -> None:
        arrived[parameter] = arrived.get(parameter, 0) + 1
        assert parameter.grad is not None
        versions[parameter] = id(parameter.grad), parameter.grad._version

    def steps(*_: Any) -> None:
        seen.backwards = max([seen.backwards, *arrived.values()])
        for parameter, before in versions.items():
            grad = parameter.grad
            seen.changed |= grad is None or (id(grad), grad._version) != before
        seen.clip = _clip_of(seen._calls, {id(p.grad) for p in versions if p.grad is not None}) or seen.clip
        arrived.clear()
        versions.clear()
        seen._calls.clear()

    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    with Unchanged(site.model, site.batch, optimizer, site.step), contextlib.ExitStack() as hooks:
        for parameter in parameters:
            hooks.callback(parameter.register_post_accumulate_grad_hook(arrives).remove)
        hooks.callback(optimizer.register_step_pre_hook(steps).remove)
        with _watching_calls(seen):
            site.step(site.batch)
    return seen


def _clip_of(calls: list[tuple[str, float, float, frozenset[int]]], gradients: set[int]) -> Clip | None:
    """The clipping that these calls add up to."""
    if not calls:
        return None
    kind, limit, norm_type, _ = calls[0]
    why = ""
    if len({call[:3] for call in calls}) > 1:
        why = "gradients are clipped in more than one way"
    elif not gradients <= frozenset().union(*(call[3] for call in calls)):
        why = "some gradients are clipped and others are not"
    elif kind == BY_VALUE and len(calls) > 1:
        why = "clip_grad_value_ is called for several sets of parameters, and fails for one without gradients"
    elif kind == BY_NORM and any(len(call[3]) > 1 for call in calls):
        why = "clipping by the common norm of several gradients (clip_grad_norm_) needs all of them at once"
    return Clip(kind, limit, norm_type, why)


@contextlib.contextmanager
def _watching_calls(seen: Seen) -> Iterator[None]:
    """Note calls of torch's clipping functions and of GradScaler.step, in this thread."""
    clips = {
        _code(clip_grad.clip_grad_value_): (BY_VALUE, "clip_value"),
        _code(clip_grad.clip_grad_norm_): (BY_NORM, "max_norm"),
    }
    scaler = _code(torch.amp.GradScaler.step)

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event != "return":
            return
        if frame.f_code in clips:
            kind, limit = clips[frame.f_code]
            found = frame.f_locals
            ids = frozenset(id(gradient) for gradient in _torch.clipped(found))
            seen._calls.append((kind, float(found[limit]), float(found.get("norm_type", 2.0)), ids))
        elif frame.f_code is scaler:
            seen.scaled = True

    before: Any = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)
        if isinstance(before, cProfile.Profile):  # which is in force without being a function
            before.enable()
        else:
            sys.setprofile(before)


def _code(function: Any) -> CodeType:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code: CodeType = function.__code__
    return code
