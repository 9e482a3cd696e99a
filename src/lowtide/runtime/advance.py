"""Advance: recompute the result of a module call, which is not kept, by running the call's forward again.

This second forward saves no tensors. In a chain of replayed blocks, only some blocks need to keep their inputs; the
inputs of the other blocks are computed from these, block after block. A recomputed input stays until the replay of its
own block has read it, so no block advances twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.errors import ReplayMismatch
from lowtide.runtime import saved_values as values
from lowtide.runtime.call_arguments import collect_call_tensors
from lowtide.runtime.replay import ReplayFrame, one_at_a_time
from lowtide.runtime.saved_values import Handle, Value, register, registered
from lowtide.runtime.view_geometry import find_base_node_and_view

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node


class Advance:
    """Recompute of the result of a module call by running its forward again.

    The result is the only tensor with a `grad_fn` that the call returned.
    """

    __slots__ = ("_frame", "_view", "operands")

    def __init__(self, frame: ReplayFrame, operands: tuple[Handle, ...], tensor: Tensor, base: Tensor) -> None:
        self._frame = frame
        self.operands = operands
        self._view = None if base is tensor else (base.size(), base.stride(), int(base.storage_offset()))
        """Size, stride and offset of the base of the call's result; None if the result is no view."""

    def make(self, value: Value) -> Tensor:
        """Run the call's forward and return its result; store it in `value` if autograd still has to read it there.

        Raises ReplayMismatch if the second run does not return exactly one tensor with a `grad_fn`, RuntimeError if an
        argument, parameter or buffer has changed.
        """
        with one_at_a_time:
            if value.tensor is not None:  # another thread has recomputed it in the meantime
                return value.tensor
            if values.observer is not None:
                values.observer.on_recompute_begin(self)
            made = self.forward()
            if values.observer is not None:
                values.observer.on_recompute_end(self, (made,))
            value.store_recomputed(made)
            return made

    def forward(self) -> Tensor:
        """Run the call's forward and return its result; if that was a view in the first run, return the view's base."""
        tensor = find_result(self._frame.run_forward_again(self.operands))
        if tensor is None:
            raise ReplayMismatch(
                f"{self._frame.interceptor} did not return a single tensor when it was replayed, as it did in the "
                "first run.",
                type(self._frame.interceptor.module),
            )
        return tensor.detach() if self._view is None else tensor.detach().as_strided(*self._view)


def find_result(returned: Any) -> Tensor | None:
    """Return the only tensor with a `grad_fn` in `returned`, a module's output; None if there is none or several."""
    results = [tensor for tensor in collect_call_tensors((returned,), {}) if tensor.grad_fn is not None]
    return results[0] if len(results) == 1 else None


def find_result_node(frame: ReplayFrame, returned: Any) -> tuple[Tensor, Tensor, Node, int] | None:
    """Find the result of a module call in its output `returned`: the only tensor with a `grad_fn`.

    Returns the result, its base if it is a view (else the result again), and the base's node and output number. Returns
    None if there is no single result, or if it is an argument of the call.
    """
    tensor = find_result(returned)
    if tensor is None:
        return None
    base, node, output, _ = find_base_node_and_view(tensor)
    if node is None:
        return None
    value = registered(node, output)
    if value is not None and any(handle.value is value for handle in frame.operands):
        return None
    return tensor, base, node, output


def leave_to_advance(frame: ReplayFrame, returned: Any, *, replayed: bool) -> Value | None:
    """Let the result of a module call be recomputed by running the call's forward again; return the result's Value.

    Returns None if the output `returned` has no single result, or if the result is kept or recomputed in another way.
    The caller has to hold the Value until the result has been saved for backward. `replayed` is True if a replay reads
    the arguments of the call, too.
    """
    result = find_result_node(frame, returned)
    if result is None:
        return None
    tensor, base, node, output = result
    value = registered(node, output)
    if value is None:
        value = Value(output=output)
        value.version = base._version
        register(node, output, value)
    elif not isinstance(value.maker, ReplayFrame):
        return None
    operands = tuple(Handle(h.value, h.view) for h in frame.operands) if replayed else frame.operands
    value.maker = Advance(frame, operands, tensor, base)
    return value
