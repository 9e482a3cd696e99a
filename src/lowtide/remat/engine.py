"""A plan, applied to a model: one pair of hooks that decides for each saved tensor to keep, remake or replay it.

The model is not rewritten. While a plan is applied each module carries one instance attribute that `Module.__call__`
asks before its own implementation (torch's seam for `Module.compile`); names, classes, hooks and `state_dict` stay as
they are, and copies and pickles of the model are plain. The attribute tells the engine in which call of which module a
tensor is saved, which is how a plan addresses it.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide._torch import CALL
from lowtide.errors import StalePlan
from lowtide.identity import fingerprint
from lowtide.remat import values
from lowtide.remat.remake import Builder, CannotRemake, Owners, producer
from lowtide.remat.replay import Frame, Surroundings, all_buffers
from lowtide.remat.values import Handle, Value, register, registered, unpack

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.planner.records import Plan


class Actions:
    """What a plan says about one call of one module: which ordinals are remade by which node, and whether it is replayed."""

    __slots__ = ("inputs", "remake", "replay")

    def __init__(self) -> None:
        self.remake: dict[int, str] = {}
        self.inputs: dict[int, str] = {}
        self.replay = False


NO_ACTIONS = Actions()


class Scope:
    """A module call in progress."""

    __slots__ = ("actions", "number", "ordinal", "path")

    def __init__(self, path: str, number: int, actions: Actions) -> None:
        self.path, self.number, self.actions = path, number, actions
        self.ordinal = 0

    @property
    def id(self) -> str:
        return f"{self.path}#{self.number}"


class Engine:
    """The pair of hooks, and where in the model the forward pass is."""

    def __init__(self, model: nn.Module, actions: Mapping[str, Mapping[int, Actions]]) -> None:
        self.model = model
        self.builder = Builder(owners(model))
        self.actions = actions
        self.scope: Scope | None = None
        self.frame: Frame | None = None
        self.replaying = False
        self.root_calls = 0
        """Calls of the root so far: module calls are numbered within one."""
        self.drifted: set[str] = set()
        """Addresses where the plan expected something else."""
        self.seams: list[Seam] = []
        self.device = next((p.device.type for p in model.parameters()), "cpu")
        self.fixed: set[int] = set()
        """Addresses of the buffers' memory: never left to a replay."""

    # --- the hooks

    def pack(self, tensor: Tensor) -> Handle:
        """Keep `tensor`, or note how it will be made again."""
        scope, frame = self.scope, self.frame
        assert scope is not None
        ordinal = scope.ordinal
        scope.ordinal = ordinal + 1
        if frame is not None:
            frame.count += 1
        handle = self.hold(tensor, scope.actions.remake.get(ordinal), frame)
        if values.probe is not None:
            values.probe.packed(handle, tensor)
        return handle

    def hold(self, tensor: Tensor, remake: str | None, frame: Frame | None) -> Handle:
        """A handle on `tensor`: on a value that is held already, remade by the node named `remake`, replayed or kept."""
        base, node, output, view = producer(tensor)
        if node is None:
            if frame is None or isinstance(base, nn.Parameter) or not self.made_inside(base, frame):
                value = Value(base.detach())
                if isinstance(base, nn.Parameter):
                    value.leaf = id(base)
            else:
                value = frame.value(frame.count - 1)
            return Handle(value, view)
        found = registered(node, output)
        if found is not None:
            if remake is None and frame is None and not found.kept:
                found.keep(base.detach())
            return Handle(found, view)
        if remake is not None:
            try:
                if node.name() == remake:
                    return Handle(self.builder.remake(node, output, base), view)
            except CannotRemake:
                pass
            self.drift()
        value = Value(base.detach()) if frame is None else frame.value(frame.count - 1)
        value.output = output
        register(node, output, value)
        return Handle(value, view)

    def made_inside(self, base: Tensor, frame: Frame) -> bool:
        """Whether a tensor without history may be dropped because the replay will make it again: not what a module owns."""
        return base.untyped_storage().data_ptr() not in self.fixed

    def drift(self) -> None:
        scope = self.scope
        assert scope is not None
        address = f"{scope.id}:{scope.ordinal - 1}"
        if not self.drifted:
            warnings.warn(
                f"this step does not save what the rehearsed one did (first at {address}): such tensors are kept. "
                "Rehearse again if the model or its input has changed.",
                stacklevel=2,
            )
        self.drifted.add(address)

    # --- the calls

    def install(self) -> None:
        """Put a seam into every module. Undone by `remove`."""
        for path, module in self.model.named_modules():
            self.seams.append(Seam(self, module, path))

    def remove(self) -> None:
        """Take every seam out again. Handles that a running backward still holds go on working."""
        while self.seams:
            self.seams.pop().remove()


class Seam:
    """Stands in a module's CALL attribute: tells the engine that the module is being called."""

    __slots__ = ("actions", "before", "buffers", "engine", "inner", "installed", "module", "modules", "number", "path", "root_call")

    def __init__(self, engine: Engine, module: nn.Module, path: str) -> None:
        self.engine, self.module, self.path = engine, module, path
        self.actions = engine.actions.get(path, {})
        self.number, self.root_call = -1, -1
        self.before = module.__dict__.get(CALL)
        self.inner = self.before or module._call_impl
        self.modules = tuple(module.modules())
        self.buffers: tuple[tuple[nn.Module, str], ...] | None = None
        """Buffers that the call writes to; None until it has been seen."""
        module.__dict__[CALL] = self

    def remove(self) -> None:
        if self.before is None:
            self.module.__dict__.pop(CALL, None)
        else:
            self.module.__dict__[CALL] = self.before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = self.engine
        if engine.replaying or torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)
        if engine.scope is None:
            if not torch.is_grad_enabled():
                return self.inner(*args, **kwargs)
            engine.root_calls += 1
            engine.fixed = {buffer.untyped_storage().data_ptr() for buffer in self.module.buffers()}
            with saved_tensors_hooks(engine.pack, unpack):  # type: ignore[arg-type]
                return self.scoped(engine, args, kwargs)
        return self.scoped(engine, args, kwargs)

    def scoped(self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.root_call != engine.root_calls:
            self.root_call, self.number = engine.root_calls, -1
        self.number += 1
        outer = engine.scope
        engine.scope = Scope(self.path, self.number, self.actions.get(self.number, NO_ACTIONS))
        if values.probe is not None:
            values.probe.entering(self, args, kwargs)
        try:
            if engine.scope.actions.replay and engine.frame is None and torch.is_grad_enabled():
                return self.framed(engine, args, kwargs)
            return self.inner(*args, **kwargs)
        finally:
            if values.probe is not None:
                values.probe.leaving(self)
            engine.scope = outer

    def framed(self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call, with everything it saves left to a replay."""
        assert engine.scope is not None
        inputs, places = engine.scope.actions.inputs, itertools.count()
        engine.frame = frame = self.open(
            engine, args, kwargs, lambda tensor: engine.hold(tensor, inputs.get(next(places)), None)
        )
        try:
            return self.inner(*args, **kwargs)
        finally:
            engine.frame = None
            if self.buffers is None:
                self.buffers = tuple(frame.surroundings.written())

    def open(
        self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], hold: Callable[[Tensor], Handle]
    ) -> Frame:
        """A frame that can run this call again with these arguments."""
        buffers = all_buffers(self.modules) if self.buffers is None else self.buffers
        surroundings = Surroundings(self.modules, buffers, engine.device)
        return Frame(self.again, args, kwargs, hold, surroundings, engine.device)

    def again(self, *args: Any, **kwargs: Any) -> Any:
        """The call once more, without telling the engine of the calls inside."""
        self.engine.replaying = True
        try:
            return self.inner(*args, **kwargs)
        finally:
            self.engine.replaying = False


def owners(model: nn.Module) -> Owners:
    """Which modules own each parameter."""
    found: dict[int, tuple[nn.Module, ...]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found[id(parameter)] = (*found.get(id(parameter), ()), module)
    return found


class Applied:
    """A plan in force on a model. Leaves it as it was on `remove()` or at the end of a `with` block."""

    def __init__(self, engine: Engine, plan: Plan) -> None:
        self.plan = plan
        self._engine = engine
        engine.install()

    @property
    def drifted(self) -> frozenset[str]:
        """Addresses of slots that were not what the rehearsal saw, and were kept instead."""
        return frozenset(self._engine.drifted)

    def remove(self) -> None:
        """Give the model back as it was. May be called again."""
        self._engine.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def actions_for(remake: Mapping[str, str], replay: Iterable[str]) -> dict[str, dict[int, Actions]]:
    """Decisions by module path and call number, from addresses as plans write them."""
    table: dict[str, dict[int, Actions]] = {}

    def of(call: str) -> Actions:
        path, _, number = call.rpartition("#")
        return table.setdefault(path, {}).setdefault(int(number), Actions())

    for address, node in remake.items():
        call, mark, place = re.split(r"([:@])(?=\d+$)", address)
        (of(call).inputs if mark == "@" else of(call).remake)[int(place)] = node
    for call in replay:
        of(call).replay = True
    return table


def apply(model: nn.Module, plan: Plan) -> Applied:
    """Put a plan in force on `model`, until `.remove()` or the end of a `with` block.

    Raises StalePlan if the plan was made for another model, device or version of torch.
    """
    found = fingerprint(model, None)
    differences = plan.fingerprint.differences(replace(found, batch=plan.fingerprint.batch))
    if differences:
        raise StalePlan(
            f"this plan is not for this {type(model).__name__}: rehearse and plan again.", differences=differences
        )
    return Applied(Engine(model, actions_for(plan.remake, plan.replay)), plan)
