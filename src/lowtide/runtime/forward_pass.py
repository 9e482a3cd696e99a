"""State of one run of a model's forward, and the pack hook that autograd calls for each saved tensor in it."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lowtide._torch.checkpointed_functions import hidden_from_checkpoints
from lowtide._torch.compiled_code import never_compiled
from lowtide._torch.modes import (
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks,
    saved_tensor_hooks_off,
)
from lowtide.runtime import saved_values as values
from lowtide.runtime.advance import leave_to_advance
from lowtide.runtime.offload import OffloadQueue
from lowtide.runtime.operand_capture import CaptureSite, OperandCapture
from lowtide.runtime.plan_table import NO_ACTIONS, Actions
from lowtide.runtime.replay import ReplayFrame
from lowtide.runtime.saved_values import Handle, KeptTensor, Value, unpack

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.runtime.call_interceptor import CallInterceptor
    from lowtide.runtime.engine import Engine
    from lowtide.runtime.learnt_slots import NeededSlots


class CallScope:
    """A module call in progress, with the plan's decisions for it and the tensors that it has saved so far."""

    __slots__ = ("_id", "actions", "held", "learnt", "n_captured", "needed", "number", "ordinal", "path", "site")

    def __init__(
        self,
        path: str,
        number: int,
        actions: Actions,
        needed: set[int] | None = None,
    ) -> None:
        self.path, self.number, self.actions = path, number, actions
        self.needed = needed
        """Ordinals of the call's saved tensors that need a handle, because the plan does not just keep them; None if
        unknown.
        """
        self.learnt: set[int] | None = None
        """Ordinals that have turned out to need a handle so far, in a run that learns them; else None."""
        self._id: str | None = None
        self.site: CaptureSite | None = None
        """Site that all numbers captured in the call share; None before the first one."""
        self.ordinal = 0
        """Number of tensors saved by the call itself, not by inner calls."""
        self.n_captured = 0
        """Number of operands captured in the call, which autograd does not record."""
        self.held: list[Value] = []
        """Captured operands that a recompute will use, held here until the recompute has handles on them."""

    @property
    def id(self) -> str:
        """Return the call's address, `path#number`."""
        if self._id is None:
            self._id = f"{self.path}#{self.number}"
        return self._id


NO_INTERCEPTORS: frozenset[CallInterceptor] = frozenset()


class CallHandler(Protocol):
    """Receiver of the module calls that interceptors report, such as a forward pass or a replay in progress."""

    @property
    def idle(self) -> frozenset[CallInterceptor]:
        """Return the interceptors whose calls need not be reported now."""

    def call(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class ThreadState(threading.local):
    """Thread-local state: the handler of module calls in this thread, None outside the model's forward."""

    handler: CallHandler | None = None

    @property
    def scope(self) -> CallScope | None:
        """Return the module call in progress; None outside a forward pass, also inside a replay."""
        return self.handler.scope if isinstance(self.handler, ForwardPass) else None


class ForwardPass:
    """State of one run of a model's forward: the module call in progress, the hooks, and facts for later runs."""

    __slots__ = (
        "__weakref__",
        "engine",
        "frame",
        "has_hooks",
        "has_room",
        "idle",
        "is_capturing",
        "last_packed",
        "learnt",
        "n_calls",
        "needed",
        "observer",
        "offloads",
        "pack",
        "packer",
        "plan",
        "results",
        "scope",
        "times",
    )  # fmt: skip

    def __init__(
        self, engine: Engine, plan: int = 0, needed: NeededSlots | None = None, *, learns: bool = False
    ) -> None:
        """Begin a run under the plan of number `plan`.

        Without `needed`, the hooks see every saved tensor. With `learns`, the run records which of them the hooks need
        to see in later runs.
        """
        self.engine, self.packer = engine, engine.packer
        self.plan = plan
        """Number of the plan in force in this run."""
        self.has_room = False
        """True if the run is within the budget even if all of its saved tensors are kept."""
        self.needed = needed
        self.learnt: list[tuple[CallInterceptor, CallScope]] | None = [] if learns else None
        """Calls whose needed saved tensors are learnt."""
        self.last_packed: Callable[[], Handle | None] = lambda: None
        self.observer = values.find_observer(engine)
        self.pack = make_pack_hook(self)
        self.idle = NO_INTERCEPTORS if needed is None else needed.idle
        self.has_hooks = False
        """True while the hooks of this run are in force, even if other hooks are in front of them."""
        self.scope: CallScope | None = None
        self.frame: ReplayFrame | None = None
        """The innermost call in progress that will be replayed."""
        self.times: defaultdict[CallInterceptor, int] = defaultdict(int)
        """Number of calls of each module so far."""
        self.n_calls: Mapping[CallInterceptor, int] = {}
        """Number of calls of each module in the first run with inputs of this size; empty in that run."""
        self.is_capturing = False
        """True while operands are being captured."""
        self.offloads = OffloadQueue()
        """Offloaded tensors that are being copied to the host."""
        self.results: list[Value] = []
        """Results of calls that are recomputed by advancing, held until their readers have handles."""

    def call(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module call under the plan, with the hooks pushed if the call saves a tensor that the plan needs."""
        needed = self.needed
        if needed is not None and interceptor in needed.idle and not self.is_capturing and self.frame is None:
            is_switched = self.switch_hooks(on=False)
            try:
                return interceptor.inner(*args, **kwargs)
            finally:
                if is_switched:
                    self.switch_hooks(on=True)
        if interceptor.is_left_alone:
            with saved_tensor_hooks_off(unpack), pausing(None), self.engine.without_plan():
                return interceptor.inner(*args, **kwargs)
        number = self.times[interceptor]
        self.times[interceptor] = number + 1
        outer, decided = self.scope, interceptor.actions[self.plan]
        actions = decided.get(number, NO_ACTIONS)
        if decided and actions is NO_ACTIONS and number >= self.n_calls.get(interceptor, inf) and number > max(decided):
            actions = self.engine.decide_further(interceptor, self.plan, number)
        ordinals = None if needed is None else needed.by_call.get(interceptor, _NO_CALLS).get(number)
        self.scope = scope = CallScope(interceptor.path, number, actions, ordinals)
        if ordinals is None and self.learnt is not None:
            scope.learnt = set()
            self.learnt.append((interceptor, scope))
        is_switched = is_pushed = False
        if needed is not None:
            if ordinals is None:
                self.engine.interceptors.inside.put_back()
            wants = ordinals is None or bool(ordinals) or interceptor.replays or self.frame is not None
            if wants and not self.has_hooks and saved_tensor_hooks() is None:
                # as `switch_hooks`, whose two calls would cost host time for each call of a module
                push_saved_tensor_hooks(self.pack, unpack)
                paused.pack, self.has_hooks, self.idle, is_pushed = None, True, NO_INTERCEPTORS, True
            else:
                is_switched = wants is not self.has_hooks and self.switch_hooks(on=wants)
        observer = self.observer
        try:
            if observer is not None:
                observer.on_enter(interceptor, args, kwargs)
            if (actions.captures or self.packer.captures_all) and not self.is_capturing:
                result = self.run_capturing(interceptor, args, kwargs)
            elif interceptor.replays:
                result = self.run_replayable(interceptor, args, kwargs)
            else:
                result = interceptor.inner(*args, **kwargs)
            if actions.shape:
                self.packer.free_values(scope, result)
            if observer is not None:
                observer.on_return(interceptor, result)
            return result
        finally:
            if observer is not None:
                observer.on_exit(interceptor)
            if ordinals and needed is not None and scope.ordinal > needed.n_saved[interceptor][number]:
                needed.unneeded = None  # it may have called a module whose interceptor is out
            self.scope = outer
            if is_pushed and (top := saved_tensor_hooks()) is not None and top[0] is self.pack:
                pop_saved_tensor_hooks()
                paused.pack, self.has_hooks = self.pack, False
                self.idle = NO_INTERCEPTORS if self.is_capturing or needed is None else needed.idle
            elif is_switched:
                self.switch_hooks(on=not self.has_hooks)

    def switch_hooks(self, *, on: bool) -> bool:
        """Push this run's saved-tensor hooks if `on`, else pop them; return True if that was done.

        They are pushed only if no hooks are in force, and popped only if they are the innermost hooks.
        """
        top = saved_tensor_hooks()
        if on:
            if top is not None:
                return False
            push_saved_tensor_hooks(self.pack, unpack)
            paused.pack = None
        else:
            if top is None or top[0] is not self.pack:
                return False
            pop_saved_tensor_hooks()
            paused.pack = self.pack
        self.has_hooks = on
        self.idle = NO_INTERCEPTORS if on or self.is_capturing or self.needed is None else self.needed.idle
        return True

    def run_capturing(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call and capture the operands that autograd does not record, in the call and in calls inside it."""
        self.is_capturing = True
        try:
            with OperandCapture(self):
                if interceptor.replays:
                    return self.run_replayable(interceptor, args, kwargs)
                return interceptor.inner(*args, **kwargs)
        finally:
            self.is_capturing = False

    def get_site_of_numbers(self) -> CaptureSite:
        """Return the site for numbers captured in the module call in progress; all of them share one."""
        scope = self.scope
        assert scope is not None
        if scope.site is None:
            scope.site = CaptureSite(scope.id)
        return scope.site

    def unrecorded(self, operand: Tensor) -> tuple[CaptureSite, Value | None]:
        """Capture an operand of the call in progress that autograd does not record.

        Returns its site, and a Value that holds the operand if the plan needs it; else None.
        """
        scope = self.scope
        assert scope is not None
        place = CaptureSite(scope.id, scope.n_captured)
        if self.engine.here.handler is not self:  # a trial run inside the call
            return place, None
        scope.n_captured += 1
        value = self.packer.unrecorded(place, operand)
        if value is not None:
            scope.held.append(value)
        if (observer := values.find_observer(self.engine)) is not None:
            observer.on_capture(place, operand)
        return place, value

    def report_sized_by_contents(self, operator: str) -> None:
        """Report to the observer, if any, an operator whose memory depends on the contents of a tensor."""
        if (observer := values.find_observer(self.engine)) is not None:
            observer.on_sized_by_contents(operator)

    def run_replayable(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of the interceptor's module, and record it if the plan runs it again in backward.

        It runs again either as a replay, which restores its saved tensors, or as an advance, which restores only its
        result.
        """
        scope, outer, known = self.scope, self.frame, None
        assert scope is not None
        actions = scope.actions
        replay, advance = actions.replay, actions.advance and outer is None
        if replay or advance:
            mutable_state = interceptor.mutable_state
            known = mutable_state.as_known()
            is_as_planned = not mutable_state.is_overwritten if known is not None else self.may_replay(interceptor)
            if not (is_as_planned and torch.is_grad_enabled() and self.check_hooks(interceptor)):
                replay = advance = False
        if outer is not None:
            outer.nested.append((interceptor, replay))
        if not (replay or advance):
            return interceptor.inner(*args, **kwargs)
        hold = partial(self.argument, scope, itertools.count(), outer)
        frame = ReplayFrame(interceptor, args, kwargs, hold, outer, mutable_state)
        if known is None:
            mutable_state.get_to_know(frame.call_context)
        self.engine.relied_on.add(frame)
        self.frame = frame if replay else outer
        try:
            result = interceptor.inner(*args, **kwargs)
        finally:
            self.frame = outer
            frame.close()
        if frame.call_context.uncopied.summed:
            frame.check_buffers()
        if advance and (value := leave_to_advance(frame, result, replayed=replay)) is not None:
            self.results.append(value)
        return result

    def may_replay(self, interceptor: CallInterceptor) -> bool:
        """Return True if, as far as is known, a replay of the module in backward will repeat the call that begins.

        Returns False if an earlier call read a tensor that was overwritten before backward. Returns False, and reports
        it, if the module has changed since its plan was put in force, for example by a new hook.
        """
        if interceptor.mutable_state.is_overwritten:
            return False
        change = None if interceptor.as_planned is None else interceptor.as_planned.change()
        if change is not None:
            self.engine.messages.say_different(
                f"{change} since its plan was put in force. The plan runs {interceptor} again in backward, and has "
                "not been checked with this change: what the block saves is kept instead, so the peak may be above "
                "the budget",
                "Fit, or rehearse and plan, again.",
            )
        return change is None

    def argument(self, scope: CallScope, places: Iterator[int], outer: ReplayFrame | None, tensor: Tensor) -> Handle:
        """Return a handle on `tensor`, an argument of a module call (`scope`) that will be replayed.

        `places` yields the arguments' ordinals. If the call is inside another replayed call, with the frame `outer`,
        the argument counts as a saved tensor of that outer call.
        """
        if outer is not None:
            outer.count += 1
        handle = self.packer.hold(tensor, scope.actions.inputs.get(next(places)), outer, scope)
        if handle.value.maker is None and tensor.grad_fn is None:  # a mask, which autograd need not save
            if isinstance(
                handle.view, torch.Tensor
            ):  # a view of the tensor itself would miss a copy made before a write
                handle = Handle(handle.value, (tensor.size(), tensor.stride(), int(tensor.storage_offset())))
            self.engine.relied_on.of(handle.value, tensor)
        return handle

    def check_hooks(self, interceptor: CallInterceptor) -> bool:
        """Return True if Lowtide's saved-tensor hooks are the innermost ones; otherwise report that the plan can't
        replay the call.
        """
        hooks = saved_tensor_hooks()
        if hooks is not None and hooks[1] is unpack:
            return True
        self.engine.messages.say(
            f"the plan replays {interceptor}, whose saved tensors are packed by other hooks: torch.utils.checkpoint, "
            "gradient_checkpointing_enable() or saved_tensors_hooks in the model. Those take precedence. Rehearse "
            "again with them."
        )
        return False


class _Paused(threading.local):
    """Per thread, the pack hook of a planned forward while its saved-tensor hooks are switched off for a moment; else
    None.
    """

    pack: Callable[[Tensor], Any] | None = None


paused = _Paused()


@contextlib.contextmanager
def pausing(pack: Callable[[Tensor], Any] | None) -> Iterator[None]:
    """Set `paused.pack` to `pack` inside the block, in this thread.

    While `paused.pack` is a pack hook, plans on inner models do nothing: their saved tensors belong to the outer plan,
    which owns the hook.
    """
    before, paused.pack = paused.pack, pack
    try:
        yield
    finally:
        paused.pack = before


def make_pack_hook(run: ForwardPass) -> Callable[[Tensor], Handle | KeptTensor]:
    """Return the pack hook of `run`, which refers to the run weakly.

    Autograd holds the hook as long as the saved tensor, so it must not keep alive a model that stores its own output.
    """
    reference = weakref.ref(run)

    @hidden_from_checkpoints
    @never_compiled
    def pack(tensor: Tensor) -> Handle | KeptTensor:
        run = reference()
        assert run is not None  # this thread runs the forward
        scope, frame = run.scope, run.frame
        assert scope is not None
        ordinal = scope.ordinal
        if frame is None:
            if scope.needed is not None and ordinal not in scope.needed:
                scope.ordinal = ordinal + 1
                is_parameter = tensor.requires_grad and tensor.grad_fn is None
                return tensor if is_parameter else tensor.detach(), tensor._version
        elif (
            scope.learnt is None and run.observer is None and not scope.held and ordinal not in scope.actions.recompute
        ):
            handle = frame.pack_result(tensor)
            if handle is not None:
                scope.ordinal = ordinal + 1
                return handle
        # in a device's thread, while a backward pass with `create_graph` runs inside the forward
        if run.engine.here.handler is None:
            with run.engine.handling(run):
                return run.packer.pack(run, tensor)
        return run.packer.pack(run, tensor)

    return pack if values.native is None else values.native.Pack(reference, pack)


_NO_CALLS: Mapping[int, set[int]] = {}


class Passthrough:
    """Handler of module calls that runs each call as without a plan."""

    def __init__(self, idle: frozenset[CallInterceptor]) -> None:
        self.idle = idle

    def call(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return interceptor.inner(*args, **kwargs)
