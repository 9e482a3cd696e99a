"""One run of a model's forward: which call of which module is in progress, and what is left to replays."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lowtide._torch.modes import saved_tensor_hooks, saved_tensor_hooks_off
from lowtide.runtime import saved_values as values
from lowtide.runtime.advance import left_to_advance
from lowtide.runtime.offload import Departures
from lowtide.runtime.operand_capture import Noting, Place
from lowtide.runtime.plan_table import NO_ACTIONS, Actions, Decision
from lowtide.runtime.replay import Frame
from lowtide.runtime.saved_values import Handle, Value, unpack

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.runtime.call_interceptor import Seam
    from lowtide.runtime.engine import Engine


class Scope:
    """A module call in progress."""

    __slots__ = ("actions", "held", "noted", "number", "ordinal", "path")

    def __init__(self, path: str, number: int, actions: Actions) -> None:
        self.path, self.number, self.actions = path, number, actions
        self.ordinal = 0
        """Tensors saved by the call itself, not by calls inside of it."""
        self.noted = 0
        """Tensors that operators in it were given and autograd did not record."""
        self.held: list[Value] = []
        """Those of them that something will be made of: held until somebody has claimed them."""

    @property
    def id(self) -> str:
        return f"{self.path}#{self.number}"


class Called(Protocol):
    """Who is told that a module is called: the forward pass, or a replay in progress."""

    def call(self, seam: Seam, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class Here(threading.local):
    """Who is told in this thread; nobody outside of the model."""

    now: Called | None = None


class Pass:
    """One run of the model's forward: where in the model it is."""

    __slots__ = ("__weakref__", "departures", "engine", "frame", "notes", "plan", "results", "scope", "times")

    def __init__(self, engine: Engine, plan: int = 0) -> None:
        self.engine = engine
        self.plan = plan
        """The number of the plan in force in it."""
        self.scope: Scope | None = None
        self.frame: Frame | None = None
        """The innermost call in progress that will be replayed."""
        self.times: dict[Seam, int] = {}
        """Calls of each module so far."""
        self.notes = False
        """Whether what operators are given is being noted."""
        self.departures = Departures()
        """What leaves for the host."""
        self.results: list[Value] = []
        """Results of calls, made again by advancing: held until those who are given them have handles."""

    def call(self, seam: Seam, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module is called."""
        if seam.is_left_alone:
            with saved_tensor_hooks_off(unpack), self.engine.apart():
                return seam.inner(*args, **kwargs)
        number = self.times.get(seam, 0)
        self.times[seam] = number + 1
        outer = self.scope
        self.scope = scope = Scope(seam.path, number, seam.actions[self.plan].get(number, NO_ACTIONS))
        probe = values.probe_of(self.engine)
        try:
            if probe is not None:
                probe.entering(seam, args, kwargs)
            run = self.framed if seam.replays else self.run
            if self.engine.notes(scope) and not self.notes:
                result = self.noting(run, seam, args, kwargs)
            else:
                result = run(seam, args, kwargs)
            if scope.actions.shape:
                self.engine.let_go_of_values(scope, result)
            if probe is not None:
                probe.returning(seam, result)
            return result
        finally:
            if probe is not None:
                probe.leaving(seam)
            self.scope = outer

    def run(self, seam: Seam, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's implementation."""
        return seam.inner(*args, **kwargs)

    def noting(self, run: Callable[..., Any], seam: Seam, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call in which it is noted what operators are given, those in calls inside of it too."""
        self.notes = True
        try:
            with Noting(self):
                return run(seam, args, kwargs)
        finally:
            self.notes = False

    def where(self) -> str:
        """The call in progress."""
        assert self.scope is not None
        return self.scope.id

    def unrecorded(self, operand: Tensor) -> tuple[Place, Value | None]:
        """An operator in it was given a tensor that autograd does not record."""
        scope = self.scope
        assert scope is not None
        place = Place(scope.id, scope.noted)
        if self.engine.here.now is not self:  # a trial run inside of it
            return place, None
        scope.noted += 1
        value = self.engine.unrecorded(place, operand)
        if value is not None:
            scope.held.append(value)
        if (probe := values.probe_of(self.engine)) is not None:
            probe.noted(place, operand)
        return place, value

    def sized_by_contents(self, operator: str) -> None:
        """An operator in it gave what is as large as the contents of a tensor make it."""
        if (probe := values.probe_of(self.engine)) is not None:
            probe.sized_by_contents(operator)

    def framed(self, seam: Seam, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that the plan may want replayed: then everything it saves is left to that. Or advanced: its result."""
        scope, outer = self.scope, self.frame
        assert scope is not None
        replay, advance = scope.actions.replay, scope.actions.advance and outer is None
        if (replay or advance) and not (torch.is_grad_enabled() and self.ours(seam) and self.may_replay(seam)):
            replay = advance = False
        if outer is not None:
            outer.nested.append((seam, replay))
        if not (replay or advance):
            return seam.inner(*args, **kwargs)
        hold = partial(self.argument, scope.actions.inputs, itertools.count(), outer)
        frame = Frame(seam, args, kwargs, hold, outer)
        self.engine.relied_on.frames.add(frame)
        self.frame = frame if replay else outer
        try:
            result = seam.inner(*args, **kwargs)
        finally:
            self.frame = outer
            frame.close()
        frame.check_buffers()
        if advance and (value := left_to_advance(frame, result, replayed=replay)) is not None:
            self.results.append(value)
        return result

    def may_replay(self, seam: Seam) -> bool:
        """Whether a call of the module finds in backward what it finds now, as far as is known.

        Not if something was put on the module since its plan was put in force: then say so.
        """
        if seam.reach.is_overwritten:
            return False
        change = None if seam.as_planned is None else seam.as_planned.change()
        if change is not None:
            self.engine.say(
                f"{change} since its plan was put in force. The plan runs {seam} again in backward, and was not "
                "compared with that: what the block saves is kept instead, so the peak may be above the budget. Fit, "
                "or rehearse and plan, again."
            )
        return change is None

    def argument(
        self, decisions: Mapping[int, Decision], places: Iterator[int], outer: Frame | None, tensor: Tensor
    ) -> Handle:
        """Hold an argument of a call that will be replayed, as if the call around it had saved it."""
        if outer is not None:
            outer.count += 1
        return self.engine.hold(tensor, decisions.get(next(places)), outer)

    def ours(self, seam: Seam) -> bool:
        """Whether saved tensors come to us here; if not, say so."""
        hooks = saved_tensor_hooks()
        if hooks is not None and hooks[1] is unpack:
            return True
        self.engine.say(
            f"the plan replays {seam}, whose saved tensors are in the hands of other hooks: torch.utils.checkpoint, "
            "gradient_checkpointing_enable() or saved_tensors_hooks in the model. They win. Rehearse again with them."
        )
        return False


class Aside:
    """A call of the model in which the plan does nothing."""

    def call(self, seam: Seam, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return seam.inner(*args, **kwargs)
