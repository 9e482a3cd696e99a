"""A plan in force on a model: one pair of hooks that keeps, recomputes or replays each saved tensor.

Interceptors in the modules report which call of which module is running; a plan addresses a saved tensor by that call
and by its ordinal there. The pack hook returns a `Handle`, which the unpack hook reads in backward. A handle refers to
a `Value`: a kept tensor, or one that its `maker` recomputes or replays.

All state of a forward pass is in one `ForwardPass`, so nothing is left over when it ends, however it ends: the call in
progress is its `scope`, and the innermost call around it that will be replayed is its `frame`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from lowtide._torch.backward import in_backward, in_transform
from lowtide._torch.modes import off_in_transforms, saved_tensor_hooks
from lowtide._torch.modules import CALL
from lowtide._torch.nodes import node_metadata
from lowtide._torch.privateuse1 import without_overrides
from lowtide._torch.tensors import base_of, is_plain
from lowtide.errors import LowtideError
from lowtide.planner.address_nodes import OFFLOAD, SHAPE, SIGNS
from lowtide.runtime import saved_values as values
from lowtide.runtime.advance import Advance
from lowtide.runtime.bypassed_calls import IN_TRANSFORM, in_hooks
from lowtide.runtime.call_interceptor import CallInterceptor, OuterInterceptor
from lowtide.runtime.call_shapes import elements_in
from lowtide.runtime.fingerprint import place_of
from lowtide.runtime.forward_pass import CallHandler, CallScope, ForwardPass, ThreadState, paused, pausing
from lowtide.runtime.inplace_gradients import InPlace, check
from lowtide.runtime.model_interceptors import ModelInterceptors
from lowtide.runtime.partial_saves import PACKINGS, packed, saved_for_shape, saves_signs
from lowtide.runtime.plan_messages import PlanMessages
from lowtide.runtime.plan_table import MOST_PATHS, Actions, Decision, NeededSlots, actions_for
from lowtide.runtime.recipes import CannotRecompute, TooSmall
from lowtide.runtime.recompute import certain
from lowtide.runtime.recompute_builder import Builder, ParameterOwners
from lowtide.runtime.replay import ReplayFrame
from lowtide.runtime.saved_values import (
    KEYS,
    SEED_BYTES,
    Handle,
    Value,
    register,
    registered,
    unpack,
    value_without_grad_fn,
)
from lowtide.runtime.tensor_writers import ReliedOn, is_overwritten
from lowtide.runtime.view_geometry import producer, whole
from lowtide.utils import interrupts as _interrupts

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node

    from lowtide.runtime.operand_capture import CaptureSite
    from lowtide.runtime.recompute_path import RecomputePath

__all__ = ["Actions", "Decision", "Engine", "ForwardPass", "actions_for"]


MAX_LEARNT_AGAIN = 3
"""Number of times that the needed saved tensors are learnt again. After that the hooks see all tensors, because runs
differ too much.
"""


class Engine:
    """The pair of saved-tensor hooks that carries out a plan, or one of several, on one model."""

    is_measured: ClassVar[bool] = False
    """True while this model's step is measured, so that plans of other models are ignored."""

    captures_all: ClassVar[bool] = False
    """True if operands that autograd does not record are captured in every call, not only where the plan says so."""

    draws: bool = False
    """True if the model skips calls at random, so that their number differs from run to run."""
    learns: bool = True
    """True if all decisions are in `actions`, so that one run shows the saved tensors that are needed."""

    def __init__(
        self,
        model: nn.Module,
        *actions: Mapping[str, dict[int, Actions]],
        in_place: Sequence[Mapping[str, int]] = (),
    ) -> None:
        """Prepare an engine for one plan, or for several, of which `choose` selects one for each run.

        Args:
            model: The model, which is changed by `install` only.
            actions: For each plan, the decisions by module path and call number.
            in_place: For each plan, the kinds of nodes whose gradients are written over incoming ones, with the least
                bytes of such a gradient.
        """
        self.model = model
        self.messages = PlanMessages(model)
        self.relied_on = ReliedOn(self.messages.say_copied, self.messages.own_tensor)
        """Tensors that recomputes and replays will read, which are copied before the program writes to them."""
        self.builder = Builder(ParameterOwners(model, self.relied_on))
        """The search for the operands of a recompute."""
        self.tables, self.in_place = actions, in_place or [{} for _ in actions]
        self.versions: dict[str, int] = {}
        """For each address the version of the recomputed tensor when it was first saved there."""
        self.drifted: set[str] = set()
        """Addresses where a step has saved something other than the plan expected."""
        self.ambiguous_addresses: frozenset[str] = frozenset()
        """Addresses at which different calls save different tensors; mismatches are expected, and the tensor kept."""
        self.excluded_modules: frozenset[str] = frozenset()
        """Paths of modules whose saved tensors autograd keeps, as without a plan: they differ from step to step."""
        self.n_runs = 0
        """Number of calls from outside that reached the engine and may be followed by a training backward."""
        self.n_runs_in_eval_mode = 0
        """Number of calls from outside that were passed through because the model was in eval mode."""
        self.bypassed: str | None = None
        """Description of a call whose saved tensors the plan could not reach, with a remedy."""
        self.here = ThreadState()
        """The handler of module calls in this thread: the run in progress, if any."""
        self.learnt = [NeededSlots() for _ in actions]
        """For each plan, the saved tensors that the hooks have to see, learnt from runs."""
        self.needed: list[NeededSlots | None] = [None for _ in actions]
        """The entries of `learnt` for plans whose learning run is complete; None where the next run has to see all."""
        self.learns_again = False
        """True if a recompute has taken another path than in the learning run, so that the next run has to learn."""
        self.n_learnt_again = 0
        """Number of learning runs after the first one of each plan."""
        self._last_packed: Callable[[], object] = lambda: None
        """Function that returns the last saved tensor of the learning run, or None once backward has read it. Until
        then further calls of the model are of the same step, and may need other tensors.
        """
        self._writing: InPlace | None = None
        """The permission to write gradients in place, while it is in force."""
        self._thread: int | None = None
        """The thread of the run in progress."""
        self.interceptors = ModelInterceptors()
        self._n_calls: dict[tuple[int, CallInterceptor], tuple[int, dict[CallInterceptor, int]]] = {}
        """The first run of each plan that began with a call of each module: its number of elements, and its number of
        calls of each module.
        """

    @property
    def scope(self) -> CallScope | None:
        """Return the module call in progress in this thread."""
        return self.here.now.scope if isinstance(self.here.now, ForwardPass) else None

    # --- the hooks

    def pack_saved_tensor(self, now: ForwardPass, tensor: Tensor) -> Handle:
        """Keep `tensor`, or record how to recompute it."""
        scope, frame = now.scope, now.frame
        assert scope is not None
        ordinal = scope.ordinal
        scope.ordinal = ordinal + 1
        if frame is not None:
            frame.count += 1
        decision = scope.actions.recompute.get(ordinal)
        handle = None
        if decision is not None and decision.path is not None and frame is None and scope.needed is not None:
            handle = self.follow_path(tensor, decision, decision.path)
        if handle is None:
            handle = self.hold(tensor, decision, frame, scope)
        if scope.held:
            scope.held = [value for value in scope.held if not value.readers]
        if now.probe is not None:
            now.probe.packed(handle, tensor)
        if scope.learnt is not None:
            now.last_packed = weakref.ref(handle)
        return handle

    def hold(self, tensor: Tensor, decision: Decision | None, frame: ReplayFrame | None, scope: CallScope) -> Handle:
        """Return a handle on `tensor`, whose value is shared with an earlier slot, recomputed, replayed by `frame`, or
        kept.

        The tensor is the last one saved in the call of `scope`, or an argument of that call.
        """
        if decision is None and frame is None and (handle := self.keep(tensor)) is not None:
            if scope.learnt is not None:
                handle.value.saved_in(scope.learnt, scope.ordinal - 1)
            return handle
        if scope.learnt is not None:
            scope.learnt.add(scope.ordinal - 1)
        if base_of(tensor) is None:  # as `whole` does
            base, node, output, view = tensor, tensor.grad_fn, tensor.output_nr, None
        else:
            base, node, output, view = producer(tensor)
        leaves = None
        if decision is not None and decision.node in PACKINGS:
            try:
                return self.hold_what_is_read(tensor, decision)
            except TooSmall:
                decision = None
            except CannotRecompute:
                self.note_drift(decision)
                decision = None
        if decision is not None and decision.node == OFFLOAD:
            leaves, decision = decision if frame is None else None, None
        if node is None:
            if decision is not None:
                self.note_drift(decision)
            value = without_history(tensor, base, frame)
            if value.leaf and view is None and leaves is None:
                return Handle(value, tensor)
            return Handle(value if leaves is None else self.offload(value, base, leaves), view)
        held = registered(node, output)
        if held is not None and shared(held, base, frame) and (decision is None or certain(held)):
            if held.places is not None:
                held.need()
            passing, held.passing = held.passing, False
            if decision is None and not (held.kept or isinstance(held.maker, Advance)):
                if frame is not None:
                    frame.adopt(held, tensor, base, passing=passing)
                elif leaves is None:
                    held.keep(base.detach())
                elif isinstance(held.maker, ReplayFrame):
                    self.offload(held, base, leaves)
            return Handle(held, view)
        if decision is not None:
            try:
                if node.name() == decision.node:
                    return Handle(self.recompute(node, output, base, held, decision, scope), view)
            except _NotLearnt:
                value = Value(base.detach())
                value.output = output
                return Handle(value, view)
            except CannotRecompute:
                pass
            self.note_drift(decision, node)
        value = Value(base.detach()) if frame is None else frame.value(tensor, base)
        value.output = output
        register(node, output, value)
        return Handle(value if leaves is None else self.offload(value, base, leaves), view)

    def keep(self, tensor: Tensor) -> Handle | None:
        """Return a handle on `tensor`, which has no decision and no replay around it; None if it is recomputed.

        This is the common case. Backward reads the detached tensor that is created here, with no view to take then.
        """
        base, node, output = whole(tensor)
        value = without_history(tensor, base, None) if node is None else registered(node, output)
        if value is not None and not value.kept:
            return None
        if node is not None and (value is None or value.version != base._version):
            value = Value(base.detach(), output=output)
            register(node, output, value)
        assert value is not None
        if base is tensor:  # backward reads a parameter as it is then, as after `parameter.data = other`
            return Handle(value, tensor if value.leaf else None)
        return Handle(value, tensor.detach())

    def recompute(
        self, node: Node, output: int, base: Tensor, earlier: Value | None, decision: Decision, scope: CallScope
    ) -> Value:
        """Return a value that recomputes `base`, the output of `node`.

        If the output was an intermediate of other recomputes so far, `earlier` is its value, and is returned, so that
        all of them share one recompute.
        """
        if self.versions.setdefault(decision.address, base._version) != base._version:
            raise CannotRecompute("it is written to without autograd, and was not before")
        value = self.recompute_by_search(node, output, base, decision, scope)
        if earlier is not None and earlier.passing:
            earlier.maker, earlier.passing, value = value.maker, False, earlier
            register(node, output, earlier)
        value.version = base._version
        return value

    def follow_path(self, tensor: Tensor, decision: Decision, path: RecomputePath) -> Handle | None:
        """Return a handle on a value that recomputes `tensor` from operands where earlier runs found them.

        Returns None if anything differs from those runs; `hold` then searches for the operands.
        """
        base, view = tensor, None
        if base_of(tensor) is not None:
            base, _, _, view = producer(tensor)
        node, output, version = base.grad_fn, base.output_nr, base._version
        if node is None or node.name() != decision.node or self.versions.get(decision.address) != version:
            return None
        if output or base.storage_offset() or not is_plain(base) or KEYS[0] in node_metadata(node):
            return None
        try:
            value = path.follow(self.builder, node, output, base)
        except CannotRecompute:
            return None
        if value is None:
            return None
        value.version = version
        return Handle(value, view)

    def recompute_by_search(self, node: Node, output: int, base: Tensor, decision: Decision, scope: CallScope) -> Value:
        """Return a value that recomputes `base`, after a search for its operands, and remember where they were
        found.
        """
        self.builder.length = 0
        path = None
        try:
            if scope.needed is None or decision.n_paths == MOST_PATHS:
                value = self.builder.recompute(node, output, base)
            else:
                decision.n_paths += 1
                value, path = self.builder.path_to(node, output, base)
        except CannotRecompute:
            self.learns_again = True
            raise
        if scope.needed is None:
            decision.lengths.add(self.builder.length)
        elif self.builder.length not in decision.lengths:
            self.learns_again = True
            raise _NotLearnt
        decision.path = path or decision.path
        return value

    def hold_what_is_read(self, tensor: Tensor, decision: Decision) -> Handle:
        """Return a handle on the part of `tensor` that its reader needs. Raises CannotRecompute for another reader."""
        if decision.node == SHAPE:
            value = Value(tensor.detach())  # held until the call ends (`free_values`)
            value.partial = True
            return Handle(value)
        if decision.node == SIGNS and not saves_signs(tensor):
            raise CannotRecompute("it is not saved for its signs")
        return Handle(packed(decision.node, tensor))

    def free_values(self, scope: CallScope, result: Any) -> None:
        """Reduce the saved input of a finished call to its shape, as decided, if backward reads nothing else of it."""
        held = saved_for_shape(result)
        for ordinal, decision in scope.actions.recompute.items():
            if decision.node != SHAPE or ordinal >= scope.ordinal:  # nothing was saved
                continue
            if held is not None and held.value.kept and held.value.tensor is not None:
                held.become(packed(SHAPE, held.value.tensor))
            else:
                self.note_drift(decision)

    def offload(self, value: Value, base: Tensor, decision: Decision) -> Value:
        """Offload `value` to host memory until backward, or keep it if that is impossible."""
        now = self.here.now
        if not (isinstance(now, ForwardPass) and now.departures.leave(base, value)):
            value.keep(base.detach())
            self.note_drift(decision)
        return value

    def unrecorded(self, place: CaptureSite, operand: Tensor) -> Value | None:
        """Return a value that holds `operand`, which autograd does not record for its operator, if one is needed."""
        assert self.scope is not None
        is_wanted = place.ordinal in self.scope.actions.noted and not is_overwritten(operand)
        return self.relied_on.of(Value(operand.detach()), operand) if is_wanted else None

    def has_room(self, now: ForwardPass) -> bool:
        """Return True if this run is within the budget even if all of its saved tensors are kept."""
        return False

    def note_drift(self, decision: Decision, node: Node | None = None) -> None:
        """Record that the tensor saved at this address, made by `node`, differs from the plan.

        A small last batch may take other kernels, and save other tensors, without need of any plan. Where blocks are
        skipped at random, another node makes the input of a block that follows; peaks were measured in such steps.
        """
        now = self.here.now
        if node is not None and self.draws:
            return
        if decision.address in self.ambiguous_addresses or (isinstance(now, ForwardPass) and self.has_room(now)):
            return
        self.drifted.add(decision.address)
        if len(self.drifted) == 1:
            name = decision.node if node is None else node.name()
            difference = "" if name == decision.node else f": {name}, where the plan has {decision.node}"
            self.messages.say_different(
                f"this step saves different tensors than the rehearsed step (first at {decision.address}{difference}): "
                "these tensors are kept, so the peak may be above the budget",
                "Rehearse and plan again if the model or its input has changed.",
            )

    def decide_further(self, interceptor: CallInterceptor, plan: int, number: int) -> Actions:
        """Return decisions for a call that the plan does not have, because the module is called more often than in the
        first run: those for the module's last call in the plan.
        """
        self.messages.say_different(
            "this step calls modules more often than the first step under the plan did: further calls get the last "
            "decision for their module, and the peak may be above the budget",
            "Rehearse the step with the most calls.",
        )
        decided = interceptor.actions[plan]
        last = max(decided)
        path = f"{interceptor.path}#"
        return decided.setdefault(number, decided[last].moved(f"{path}{last}", f"{path}{number}"))

    # --- the calls

    @property
    def does_anything(self) -> bool:
        """Return True if any plan has an effect, for any batch."""
        return any(self.tables) or any(self.in_place)

    def choose(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the number of the plan for a run of the model that begins with this call."""
        return 0

    def keeps_all(self, plan: int) -> bool:
        """Return True if the plan changes nothing about saved tensors, so that no hooks are needed."""
        return False

    def begin(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model, or a part of it called directly, with hooks if a training backward will follow."""
        if not torch.is_grad_enabled() or in_backward():
            with without_overrides():  # a call inside backward, where a torch.utils.checkpoint recomputes
                return interceptor.inner(*args, **kwargs)
        if not self.model.training:
            self.n_runs_in_eval_mode += 1
            return interceptor.inner(*args, **kwargs)
        self.n_runs += 1
        _interrupts.install_handler()
        if in_transform():  # transforms allow no saved-tensor hooks: run as without a plan
            self.bypassed = IN_TRANSFORM
            if self.does_anything:
                self.messages.say(
                    f"{interceptor} was called inside a transform of torch.func (grad, vmap, ...): the plan does "
                    "nothing there."
                )
            with self.now(self.interceptors.passthrough):
                return interceptor.inner(*args, **kwargs)
        hooks = saved_tensor_hooks() or (None if paused.pack is None else (paused.pack, unpack))
        if hooks is not None:
            self.bypassed = in_hooks(hooks[0])
            if self.does_anything and hooks[1] is not unpack:  # hooks that are not those of a plan on an outer model
                self.messages.say(
                    f"{interceptor} was called inside other saved-tensor hooks (torch.utils.checkpoint or "
                    "saved_tensors_hooks around it). Those take precedence: the plan does nothing there."
                )
            with self.now(self.interceptors.passthrough):
                return interceptor.inner(*args, **kwargs)
        plan = self.choose(interceptor, args, kwargs)
        writing, least = self._writing, self.in_place[plan]
        if writing is None or self.is_measured or (not least and writing.least is least):
            return self.run(plan, interceptor, args, kwargs)
        with writing.of_run(least) as outputs:
            outputs.append(self.run(plan, interceptor, args, kwargs))
            return outputs[0]

    def run(self, plan: int, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model, or a part of it, with hooks if `plan` changes anything about saved tensors."""
        if self.keeps_all(plan):
            return self._run_as_without_plan(interceptor, args, kwargs)
        is_probed = values.observer_of(self) is not None
        if self.learns_again and not is_probed:
            self.learns_again, self.needed[plan] = False, None
            self.n_learnt_again += 1
            self.learns = self.learns and self.n_learnt_again < MAX_LEARNT_AGAIN
        needed = None if is_probed or self._last_packed() is not None else self.needed[plan]
        now = ForwardPass(self, plan, needed, learns=self.learns and not is_probed and not self.builder.owners.sharded)
        n_elements = elements_in(args, kwargs)
        now.n_elements = n_elements if interceptor.module is self.model else 0
        first = self._n_calls.get((plan, interceptor))
        if first is not None and first[0] == n_elements:
            now.n_calls = first[1]
        alone = self._alone(interceptor)
        inside = self.interceptors.inside.staying(None if needed is None else needed.unneeded)
        with off_in_transforms(unpack, self.without_plan), self.now(now), alone, inside, pausing(now.pack):
            if needed is None:
                now.switch_hooks(on=True)
            try:
                result = now.call(interceptor, args, kwargs)
            finally:
                now.departures.close()
                if now.has_hooks:
                    now.switch_hooks(on=False)
        if first is None and not self.draws:
            self._n_calls[plan, interceptor] = n_elements, dict(now.times)
        if now.learnt:
            self.needed[plan] = self.learnt[plan]
            self.learnt[plan].learn(plan, now.learnt)
            self._last_packed = now.last_packed
        return result

    def _run_as_without_plan(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        here, inside = self.here, self.interceptors.inside
        before, here.now = here.now, self.interceptors.passthrough
        try:
            inside.take_out()
            return interceptor.inner(*args, **kwargs)
        finally:
            inside.put_in()
            here.now = before

    def without_plan(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which calls of modules in this thread run as without a plan."""
        return self.now(self.interceptors.passthrough)

    @contextlib.contextmanager
    def _alone(self, interceptor: CallInterceptor) -> Iterator[None]:
        """Raise LowtideError if another thread is in the model: replays restore state of the whole process."""
        before, me = self._thread, threading.get_ident()
        if before not in (None, me) and any(interceptor.replays for interceptor in self.interceptors.all):
            raise LowtideError(
                f"{interceptor} is called in two threads at once, and the plan replays parts of the model: a replay "
                "restores random number generators and hooks, which belong to the whole process. Call the model in one "
                "thread at a time, or fit with a larger budget, for which nothing is replayed."
            )
        self._thread = me
        try:
            yield
        finally:
            self._thread = before

    @contextlib.contextmanager
    def now(self, called: CallHandler) -> Iterator[None]:
        """Report module calls in this thread to `called` inside the block."""
        before, self.here.now = self.here.now, called
        try:
            yield
        finally:
            self.here.now = before

    def install(self) -> None:
        """Install an interceptor in every module, until `remove`. Raises LowtideError if the model has a plan."""
        front = self.model.__dict__.get(CALL)
        while isinstance(front, CallInterceptor | OuterInterceptor):
            if isinstance(front, CallInterceptor) and front.engine.model is self.model:
                raise LowtideError(
                    f"there is a plan in force on this {type(self.model).__name__} already: remove it first with "
                    "lowtide.remove(model)."
                )
            front = front.before
        if self.is_measured or any(self.in_place):
            device = place_of(self.model).type
            writing = InPlace(device, self.wrote_in_place, alone=self.is_measured)
            if nodes := {node for each in self.in_place for node in each}:
                check(device, nodes)
            if self.is_measured:
                writing.of_all(self.in_place[0])
            self._writing = writing
        self.relied_on.watch()
        self.learnt, self.needed = [NeededSlots() for _ in self.tables], [None for _ in self.tables]
        self._n_calls.clear()
        self.interceptors.install(self)

    def wrote_in_place(self, node: str, n_bytes: int) -> None:
        """Tell the observer that a gradient will be written over the one that arrived at a node of kind `node`."""
        if (probe := values.observer_of(self)) is not None:
            probe.writing_over(node, n_bytes)

    def remove(self) -> None:
        """Remove every interceptor. Handles that a running backward still holds keep working."""
        if self._writing is not None:
            self._writing.remove()
            self._writing = None
        self.relied_on.leave()
        self.interceptors.remove()


class _NotLearnt(Exception):
    """Signal that a recompute takes another path than in the learning run, which showed the needed saved tensors."""


def without_history(tensor: Tensor, base: Tensor, frame: ReplayFrame | None) -> Value:
    """Return the value behind a tensor that no node made: kept, unless it is an argument or result of a replay."""
    if frame is not None and not frame.is_static(base):
        if (given := frame.arguments.given(base)) is not None:
            return given
        if base.numel() * base.element_size() > SEED_BYTES:
            return frame.value(tensor, base)
    return value_without_grad_fn(base)


def shared(value: Value, base: Tensor, frame: ReplayFrame | None) -> bool:
    """Return True if a slot of `base` in `frame` can share the value of an earlier slot of the same output.

    False if the tensor was changed in between without autograd noticing. False too if it is left to the replay of a
    finished call unrelated to `frame`, such as the cast of a weight that autocast cached there: that replay would
    run too early. `frame` sees such a tensor itself.
    """
    if value.version not in (base._version, -1):
        return False
    if frame is None or not isinstance(value.maker, ReplayFrame):
        return True
    return value.maker.encloses(frame) or frame.encloses(value.maker)
