"""Observe one step: find changes of gradients between backward and `optimizer.step()`.

Clipping is recognized by torch's clipping functions, however they were imported; any other change by the versions of
the gradients.
"""

from __future__ import annotations

import contextlib
import cProfile
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from lowtide._torch import optim as torch_optim
from lowtide._torch.optim import list_parameters
from lowtide.levers.lever import Settings, StepContext
from lowtide.state.step_outcome import digest
from lowtide.state.step_snapshot import StepSnapshot

if TYPE_CHECKING:
    from torch.optim import Optimizer

BY_VALUE, BY_NORM, BY_COMMON_NORM = "clip_value", "clip_norm", "clip_common_norm"


@dataclass(frozen=True, slots=True)
class Clip:
    """Clipping of gradients: each by itself, or all by their common norm (`two_pass_clipping.py`)."""

    kind: str
    limit: float
    norm_type: float = 2.0
    raises: bool = False
    """True if a norm that is not finite is an error (`error_if_nonfinite`)."""
    foreach: bool | None = None
    """The argument `foreach` of torch's clipping functions."""
    why_not: str = ""
    """The reason why the clipping can't be done parameter by parameter."""
    clipped: tuple[Tensor, ...] = ()
    """The parameters whose gradients have a common norm, in the order in which the norm is computed."""

    @classmethod
    def from_settings(cls, settings: Settings) -> Self | None:
        """Build the clipping that a lever's settings describe; None if they have no entry for clipping."""
        for kind in (BY_VALUE, BY_NORM, BY_COMMON_NORM):
            if kind in settings:
                norm_type = settings.get("norm_type", 2.0)
                if "infinite" in settings:
                    norm_type = math.inf * settings["infinite"]
                foreach = bool(settings["foreach"]) if "foreach" in settings else None
                return cls(kind, settings[kind], norm_type, bool(settings.get("error_if_nonfinite")), foreach)
        return None

    @property
    def settings(self) -> Settings:
        """This clipping as settings of the lever; the inverse of `from_settings`."""
        is_infinite = math.isinf(self.norm_type)  # JSON has no number for infinity
        settings = {self.kind: self.limit, **({} if is_infinite else {"norm_type": self.norm_type})}
        if is_infinite:
            settings["infinite"] = math.copysign(1.0, self.norm_type)
        if self.raises:
            settings["error_if_nonfinite"] = 1.0
        if self.foreach is not None:
            settings["foreach"] = float(self.foreach)
        return settings

    def apply(self, parameter: Tensor) -> None:
        """Clip one parameter's gradient with the torch function that the loop uses."""
        if self.kind == BY_VALUE:
            clip_grad.clip_grad_value_(parameter, self.limit, self.foreach)
        else:
            clip_grad.clip_grad_norm_(parameter, self.limit, self.norm_type, self.raises, self.foreach)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of one of torch's clipping functions, with its arguments."""

    kind: str
    limit: float
    norm_type: float
    raises: bool
    foreach: bool | None
    gradients: tuple[int, ...]
    """Ids of the gradients, in order."""

    @property
    def arguments(self) -> tuple[object, ...]:
        return self.kind, self.limit, self.norm_type, self.raises, self.foreach


@dataclass(slots=True)
class ObservedStep:
    """Record of one step's backward passes, gradient clipping, and other changes before the optimizer's step."""

    backwards: int = 0
    """Largest number of backward passes that added to one parameter's gradient before a step of the optimizer."""
    scaled: bool = False
    changed: bool = False
    moved: bool = False
    """True if a parameter itself was written to between the last backward pass that reached it and the step."""
    set_late: str = ""
    """A setting of a parameter group, such as its learning rate, that was set between backward and optimizer step."""
    clip: Clip | None = None
    hooked: bool = False
    """True if the step put hooks on gradients."""
    _calls: list[_Call] = field(default_factory=list)


def observe(site: StepContext, optimizer: Optimizer) -> ObservedStep:
    """Run the step once, and record its backward passes, its clipping, and other changes before the optimizer's step.

    All state is restored.
    """
    observed = ObservedStep()
    arrived: dict[Tensor, int] = {}
    versions: dict[Tensor, tuple[int, int]] = {}
    digests: dict[Tensor, str] = {}
    settings: list[GroupSettings] = []

    def note_arrival(parameter: Tensor) -> None:
        arrived[parameter] = arrived.get(parameter, 0) + 1
        assert parameter.grad is not None
        versions[parameter] = id(parameter.grad), parameter.grad._version
        digests[parameter] = digest(parameter)  # the parameter's version does not count writes through `.data`
        settings[:] = read_group_settings(optimizer)

    def on_set(name: str) -> None:
        observed.set_late = name if arrived else observed.set_late

    def note_update(*_: Any) -> None:
        if arrived:
            observed.set_late = find_changed_setting(settings, read_group_settings(optimizer)) or observed.set_late
        observed.backwards = max([observed.backwards, *arrived.values()])
        for parameter, before in versions.items():
            grad = parameter.grad
            observed.changed |= grad is None or (id(grad), grad._version) != before
            observed.moved |= digest(parameter) != digests[parameter]
        by_gradient = {id(p.grad): p for p in versions if p.grad is not None}
        observed.clip = _combine_clips(observed._calls, by_gradient) or observed.clip
        arrived.clear()
        versions.clear()
        observed._calls.clear()

    parameters = [p for p in list_parameters(optimizer) if p.requires_grad]
    with StepSnapshot(site.model, site.batch, optimizer, site.step), contextlib.ExitStack() as hooks:
        for parameter in parameters:
            hooks.callback(parameter.register_post_accumulate_grad_hook(note_arrival).remove)  # type: ignore[no-untyped-call]
        hooks.callback(optimizer.register_step_pre_hook(note_update).remove)
        hooks.enter_context(_watch_groups(optimizer, on_set))
        with _watch_calls(observed):
            site.step(site.batch)
    return observed


GroupSettings = dict[str, Any]
"""Settings of one parameter group: all entries except the parameters. A tensor is represented by its id and version."""


def read_group_settings(optimizer: Optimizer) -> list[GroupSettings]:
    """Return the current settings of all parameter groups."""

    def comparable(value: Any) -> Any:
        return (id(value), value._version) if isinstance(value, Tensor) else value

    return [{k: comparable(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def find_changed_setting(before: list[GroupSettings], after: list[GroupSettings]) -> str:
    """Return the name of a setting that differs between `before` and `after`; "" if all are equal."""
    for one, other in zip(before, after, strict=True):
        for name in one.keys() | other.keys():
            if one.get(name) != other.get(name):
                return name
    return ""


class _Group(dict[str, Any]):
    """Parameter group that calls `on_set` with the name of each assigned setting, even if its value stays the same."""

    on_set: Callable[[str], None]

    def __setitem__(self, name: str, value: Any) -> None:
        self.on_set(name)
        super().__setitem__(name, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value


@contextlib.contextmanager
def _watch_groups(optimizer: Optimizer, on_set: Callable[[str], None]) -> Iterator[None]:
    groups = list(optimizer.param_groups)
    for number, group in enumerate(groups):
        optimizer.param_groups[number] = watched = _Group(group)
        watched.on_set = on_set
    try:
        yield
    finally:
        optimizer.param_groups[:] = groups


def _combine_clips(calls: list[_Call], parameter_of: dict[int, Tensor]) -> Clip | None:
    """Combine `calls` into one clipping; None if there are none. `parameter_of` maps ids of gradients to parameters."""
    if not calls:
        return None
    first, clipped, why = calls[0], [gradient for call in calls for gradient in call.gradients], ""
    kind = BY_COMMON_NORM if first.kind == BY_NORM and len(first.gradients) > 1 else first.kind
    if len({call.arguments for call in calls}) > 1:
        why = "gradients are clipped in more than one way"
    elif math.isinf(first.limit):
        why = "gradients are clipped by an infinite norm: for what clip_grad_norm_ returns, which would be 0"
    elif not parameter_of.keys() <= set(clipped):
        why = "some gradients are clipped and others are not"
    elif kind == BY_VALUE and len(calls) > 1:
        why = "clip_grad_value_ is called for several sets of parameters, and fails for one without gradients"
    elif first.kind == BY_NORM and len(calls) > 1 and any(len(call.gradients) > 1 for call in calls):
        why = "clip_grad_norm_ is called for several sets of parameters, and each has another norm"
    elif kind == BY_COMMON_NORM and set(clipped) - parameter_of.keys():
        why = "clip_grad_norm_ is also given gradients of parameters that the optimizer does not step on"
    elif kind == BY_COMMON_NORM and len(clipped) > len(set(clipped)):
        why = "clip_grad_norm_ is given the same gradient twice"
    named = () if why or kind != BY_COMMON_NORM else tuple(parameter_of[gradient] for gradient in clipped)
    return Clip(kind, first.limit, first.norm_type, first.raises, first.foreach, why, named)


_HOOKING = frozenset({"register_hook", "register_prehook", "retain_grad"})
"""C++ methods of autograd's nodes and of tensors that make a gradient observable when it arrives."""


@contextlib.contextmanager
def _watch_calls(observed: ObservedStep) -> Iterator[None]:
    """Record calls of torch's clipping functions, GradScaler.step and functions that hook gradients, in this thread."""
    clips = {
        _unwrap_code(clip_grad.clip_grad_value_): (BY_VALUE, "clip_value"),
        _unwrap_code(clip_grad.clip_grad_norm_): (BY_NORM, "max_norm"),
    }
    scaler = _unwrap_code(torch.amp.GradScaler.step)
    hooks = {_unwrap_code(Tensor.register_hook), _unwrap_code(Tensor.register_post_accumulate_grad_hook)}

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and getattr(argument, "__name__", "") in _HOOKING:
            observed.hooked = True
        if event != "return":
            return
        if frame.f_code in clips:
            kind, limit = clips[frame.f_code]
            variables = frame.f_locals
            ids = tuple(id(gradient) for gradient in torch_optim.clipped(variables))
            norm_type, raises = float(variables.get("norm_type", 2.0)), bool(variables.get("error_if_nonfinite", False))
            observed._calls.append(_Call(kind, float(variables[limit]), norm_type, raises, variables["foreach"], ids))
        elif frame.f_code is scaler:
            observed.scaled = True
        elif frame.f_code in hooks:
            observed.hooked = True

    before: Any = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)
        if isinstance(before, cProfile.Profile):  # an active profiler that is no function
            before.enable()
        else:
            sys.setprofile(before)


def _unwrap_code(function: Any) -> CodeType:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code: CodeType = function.__code__
    return code
