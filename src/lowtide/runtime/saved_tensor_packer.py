"""The pack hook's work: each saved tensor becomes a `Handle`, which the unpack hook reads in backward.

A handle refers to a `Value`: a kept tensor, or a tensor that the value's `maker` recomputes or replays.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from lowtide._torch.nodes import node_metadata
from lowtide._torch.tensors import base_of, is_plain
from lowtide.planner.address_nodes import OFFLOAD, SHAPE, SIGNS
from lowtide.runtime.advance import Advance
from lowtide.runtime.forward_pass import CallScope, ForwardPass, ThreadState
from lowtide.runtime.partial_saves import PACKINGS, find_input_saved_for_shape, packed, saves_signs
from lowtide.runtime.plan_messages import PlanMessages
from lowtide.runtime.plan_table import MOST_PATHS, Decision
from lowtide.runtime.recipes import CannotRecompute, TooSmall
from lowtide.runtime.recompute import certain
from lowtide.runtime.recompute_builder import Builder, ParameterOwners
from lowtide.runtime.replay import ReplayFrame
from lowtide.runtime.saved_values import (
    KEYS,
    SEED_BYTES,
    Handle,
    Value,
    make_value_without_grad_fn,
    native,
    register,
    registered,
)
from lowtide.runtime.tensor_writers import ReliedOn, is_overwritten
from lowtide.runtime.view_geometry import find_base_and_node, find_base_node_and_view

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.autograd.graph import Node

    from lowtide.runtime.operand_capture import CaptureSite
    from lowtide.runtime.recompute_path import RecomputePath


class SavedTensorPacker:
    """Packer of saved tensors: each is kept, recomputed, restored by a replay, or offloaded, as a plan decides."""

    captures_all: bool = False
    """True if operands that autograd does not record are captured in every call, not only where the plan says so."""

    def __init__(self, model: nn.Module) -> None:
        self.messages = PlanMessages(model)
        self.relied_on = ReliedOn(self.messages.say_copied, self.messages.find_own_tensor)
        """Tensors that recomputes and replays will read, which are copied before the program writes to them."""
        self.builder = Builder(ParameterOwners(model, self.relied_on))
        """The search for the operands of a recompute."""
        self.here = ThreadState()
        """The handler of module calls in this thread: the run in progress, if any."""
        self.bypassed: str | None = None
        """Description of a call whose saved tensors did not reach the pack hook, with a remedy; None if all did."""
        self.versions: dict[str, int] = {}
        """For each address, the version of the recomputed tensor when it was first saved there."""
        self.drifted: set[str] = set()
        """Addresses where a step has saved something other than the plan expected."""
        self.ambiguous_addresses: frozenset[str] = frozenset()
        """Addresses at which different calls save different tensors; mismatches are expected, and the tensor kept."""
        self.draws = False
        """True if the model skips calls at random, so that their number differs from run to run."""
        self.learns_again = False
        """True if a recompute has taken another path than in the learning run, so that the next run has to learn."""

    def pack(self, run: ForwardPass, tensor: Tensor) -> Handle:
        """Return a handle on a tensor that is being saved: kept, recomputed, replayed or offloaded as decided."""
        scope, frame = run.scope, run.frame
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
        if run.observer is not None:
            run.observer.on_pack(handle, tensor)
        if scope.learnt is not None:
            run.last_packed = weakref.ref(handle)
        return handle

    def hold(self, tensor: Tensor, decision: Decision | None, frame: ReplayFrame | None, scope: CallScope) -> Handle:
        """Return a handle on `tensor`, the last tensor saved in the call of `scope`, or an argument of that call.

        Its Value is shared with an earlier saved tensor, recomputed, restored by the replay `frame`, offloaded, or
        kept.
        """
        if decision is None and frame is None and (handle := self.keep(tensor)) is not None:
            if scope.learnt is not None:
                handle.value.note_save(scope.learnt, scope.ordinal - 1)
            return handle
        if scope.learnt is not None:
            scope.learnt.add(scope.ordinal - 1)
        if base_of(tensor) is None:  # as `find_base_and_node` does
            base, node, output, view = tensor, tensor.grad_fn, tensor.output_nr, None
        else:
            base, node, output, view = find_base_node_and_view(tensor)
        offloading = None
        """The decision to offload the tensor; None inside a replayed call, whose replay restores it."""
        if decision is not None and decision.node in PACKINGS:
            if (handle := self.hold_part(tensor, decision)) is not None:
                return handle
            decision = None
        if decision is not None and decision.node == OFFLOAD:
            offloading, decision = decision if frame is None else None, None
        if node is None:
            if decision is not None:
                self.note_drift(decision)
            value = without_history(tensor, base, frame)
            if value.leaf and view is None and offloading is None:
                return Handle(value, tensor)
            return Handle(value if offloading is None else self.offload(value, base, offloading), view)
        held = registered(node, output)
        if held is not None and can_share(held, base, frame) and (decision is None or certain(held)):
            if held.places is not None:
                held.need()
            is_intermediate, held.is_intermediate = held.is_intermediate, False
            if decision is None and not (held.kept or isinstance(held.maker, Advance)):
                if frame is not None:
                    frame.take_over(held, tensor, base, is_intermediate=is_intermediate)
                elif offloading is None:
                    held.keep(base.detach())
                elif isinstance(held.maker, ReplayFrame):
                    self.offload(held, base, offloading)
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
        return Handle(value if offloading is None else self.offload(value, base, offloading), view)

    def keep(self, tensor: Tensor) -> Handle | None:
        """Return a handle that keeps `tensor`, for which there is no decision and no replay.

        Returns None if the tensor was saved before, and is recomputed or replayed by the decision for that save. This
        is the fast path for most saved tensors. The handle on a view holds the view, so that backward need not make it.
        """
        if native is not None and (handle := native.kept(tensor)) is not None:
            return handle  # type: ignore[no-any-return]
        base, node, output = find_base_and_node(tensor)
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
        """Return a Value that recomputes `base`, the output of `node`.

        `earlier` is the Value of that output so far, if any. If only other recomputes read `earlier`, it is returned,
        so that all readers share one recompute. Raises CannotRecompute, with the reason, if that is impossible.
        """
        if self.versions.setdefault(decision.address, base._version) != base._version:
            raise CannotRecompute("it is written to without autograd, and was not before")
        value = self.recompute_by_search(node, output, base, decision, scope)
        if earlier is not None and earlier.is_intermediate:
            earlier.maker, earlier.is_intermediate, value = value.maker, False, earlier
            register(node, output, earlier)
        value.version = base._version
        return value

    def follow_path(self, tensor: Tensor, decision: Decision, path: RecomputePath) -> Handle | None:
        """Return a handle on a Value that recomputes `tensor` from operands at the places in `path`.

        Returns None if anything differs from the run that recorded the path; `hold` then searches for the operands.
        """
        base, view = tensor, None
        if base_of(tensor) is not None:
            base, _, _, view = find_base_node_and_view(tensor)
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
        """Search for operands from which `base` can be recomputed; return a Value that recomputes it.

        The path to the operands is stored in `decision`, for later runs.
        """
        self.builder.length = 0
        path = None
        try:
            if scope.needed is None or decision.n_paths == MOST_PATHS:
                value = self.builder.recompute(node, output, base)
            else:
                decision.n_paths += 1
                value, path = self.builder.recompute_with_path(node, output, base)
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

    def hold_part(self, tensor: Tensor, decision: Decision) -> Handle | None:
        """Return a handle on the part of `tensor` that backward needs: its shape, its signs, or its elements in fewer
        bytes. Returns None if that saves nothing, or if `tensor` is not as the plan expects.
        """
        if decision.node == SHAPE:
            value = Value(tensor.detach())  # held until the call ends (`free_values`)
            value.is_partial = True
            return Handle(value)
        if decision.node != SIGNS or saves_signs(tensor):
            try:
                return Handle(packed(decision.node, tensor))
            except TooSmall:
                return None
            except CannotRecompute:
                pass
        self.note_drift(decision)
        return None

    def free_values(self, scope: CallScope, result: Any) -> None:
        """Replace the saved input of a finished call by its shape if the plan says so and backward reads only the
        shape.

        `result` is what the call returned. If backward may read more than the shape, the input stays, and the
        difference from the plan is reported.
        """
        held = find_input_saved_for_shape(result)
        for ordinal, decision in scope.actions.recompute.items():
            if decision.node != SHAPE or ordinal >= scope.ordinal:  # nothing was saved
                continue
            if held is not None and held.value.kept and held.value.tensor is not None:
                held.refer_to(packed(SHAPE, held.value.tensor))
            else:
                self.note_drift(decision)

    def offload(self, value: Value, base: Tensor, decision: Decision) -> Value:
        """Offload `value` to host memory until backward, or keep it if that is impossible."""
        run = self.here.handler
        if not (isinstance(run, ForwardPass) and run.offloads.enqueue(base, value)):
            value.keep(base.detach())
            self.note_drift(decision)
        return value

    def unrecorded(self, place: CaptureSite, operand: Tensor) -> Value | None:
        """Return a Value that holds `operand`, which autograd does not record, if the plan needs it; else None."""
        scope = self.here.scope
        assert scope is not None
        is_wanted = place.ordinal in scope.actions.captured and not is_overwritten(operand)
        return self.relied_on.of(Value(operand.detach()), operand) if is_wanted else None

    def note_drift(self, decision: Decision, node: Node | None = None) -> None:
        """Record that the tensor saved at the address of `decision`, made by `node`, is not the planned one. The first
        such tensor is reported.

        Expected differences are ignored: in a batch that needs no plan, such as a small last one, other kernels may
        run; where blocks are skipped at random, another node makes the next block's input.
        """
        run = self.here.handler
        if node is not None and self.draws:
            return
        if decision.address in self.ambiguous_addresses or (isinstance(run, ForwardPass) and run.has_room):
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


class _NotLearnt(Exception):
    """Signal that a recompute takes another path than in the learning run, which showed the needed saved tensors."""


def without_history(tensor: Tensor, base: Tensor, frame: ReplayFrame | None) -> Value:
    """Return a Value for `base`, which has no `grad_fn`; `tensor` is `base` or a view of it.

    `frame` is the replayed call in progress, if any. The Value is that of an argument of this call, one that the replay
    restores, or one that keeps the tensor.
    """
    if frame is not None and not frame.is_static(base):
        if (value := frame.arguments.find_value(base)) is not None:
            return value
        if base.numel() * base.element_size() > SEED_BYTES:
            return frame.value(tensor, base)
    return make_value_without_grad_fn(base)


def can_share(value: Value, base: Tensor, frame: ReplayFrame | None) -> bool:
    """Return True if `base`, which is saved once more, can share the `value` of its earlier save.

    Returns False if `base` was modified in between without autograd. Returns False too if `base` is saved in the
    replayed call of `frame`, and the replay of another finished call restores `value`, such as a weight's cast that
    autocast cached in that call: that replay would run too early, and the replay of `frame` can restore `base` itself.
    """
    if value.version not in (base._version, -1):
        return False
    if frame is None or not isinstance(value.maker, ReplayFrame):
        return True
    return value.maker.encloses(frame) or frame.encloses(value.maker)
