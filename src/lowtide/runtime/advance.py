"""Recompute of a module call's result that is not kept: the call's forward runs again on demand.

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
    """Recompute of a module call's result, its only returned tensor that needs a gradient, by running the call's
    forward again.
    """

    __slots__ = ("_frame", "_view", "operands")

    def __init__(self, frame: ReplayFrame, operands: tuple[Handle, ...], tensor: Tensor, base: Tensor) -> None:
        self._frame = frame
        self.operands = operands
        self._view = None if base is tensor else (base.size(), base.stride(), int(base.storage_offset()))
        """Geometry of the base within the call's result, if that is a view."""

    def make(self, value: Value) -> Tensor:
        """Run the call's forward and return its result, which is stored in `value` if an unread handle needs it.

        Raises ReplayMismatch if the second run does not return exactly one tensor that needs a gradient, RuntimeError
        if an argument, parameter or buffer has changed.
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
        """Run the call's forward; return its result, or the base if the result was a view in the first run."""
        tensor = find_result(self._frame.run_forward_again(self.operands))
        if tensor is None:
            raise ReplayMismatch(
                f"{self._frame.interceptor} did not return a single tensor when it was replayed, as it did in the "
                "first run.",
                type(self._frame.interceptor.module),
            )
        return tensor.detach() if self._view is None else tensor.detach().as_strided(*self._view)


def find_result(returned: Any) -> Tensor | None:
    """Return the only returned tensor that needs a gradient; None if there is none or more than one."""
    results = [tensor for tensor in collect_call_tensors((returned,), {}) if tensor.grad_fn is not None]
    return results[0] if len(results) == 1 else None


def find_result_node(frame: ReplayFrame, returned: Any) -> tuple[Tensor, Tensor, Node, int] | None:
    """Find the result of the call of `frame` in `returned`; return it, its base, and the base's node and output number.

    Returns None if there is no single result that needs a gradient, or if the result is an argument of the call.
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
    """Return a value for the result of `frame`'s call, with a maker that runs the call's forward again.

    `returned` is what the call has returned. Returns None if that is impossible, or if the result's value is kept or
    recomputed in another way. The caller holds the value until the readers of the result have handles. `replayed` is
    True if the operands of `frame` are already claimed for its replay.
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
