"""Second runs of a module call: a replay, which catches saved tensors, and an advance, which needs only the result."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from lowtide._torch.checkpointed_functions import hidden_from_checkpoints
from lowtide._torch.compiled_code import never_compiled
from lowtide._torch.nodes import next_sequence_number
from lowtide._torch.tensors import base_of
from lowtide.errors import ReplayMismatch
from lowtide.runtime import saved_values as values
from lowtide.runtime.call_arguments import collect_call_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.runtime.call_interceptor import CallInterceptor
    from lowtide.runtime.replay import ReplayFrame


class StopReplay(BaseException):
    """Signal that stops a replay. Not an Exception, so that no `except Exception` in a model catches it."""


class NestedBackward(BaseException):
    """Signal, raised in the second run of a module call, that the call's forward runs backward on its saved tensors."""


class Token:
    """Placeholder that a trial run saves in place of a tensor, to find out how long autograd would hold the tensor."""

    __slots__ = ("__weakref__",)


class _SecondRun:
    """Base class of second runs of a module call (replay and advance). A second run's own saved tensors are read only
    if the call runs backward inside its forward.
    """

    idle: ClassVar[frozenset[CallInterceptor]] = frozenset()
    compiled: ClassVar[Any] = None
    """Class of the compiled pack hooks, each made from a run and its `pack`; None if `pack` is used as it is."""

    _frame: ReplayFrame
    _holds: bool
    """True if the run's own saved tensors may be read."""
    has_ended = False

    def hold(self, tensor: Tensor) -> Tensor | Token | None:
        held = tensor.detach() if self._holds else None if self._frame.held is None else Token()
        if self._frame.held is not None and held is not None:
            self._frame.held.append(weakref.ref(held))
        return held

    @never_compiled
    def unpack(self, held: Tensor | Token | None) -> Tensor:
        if held is not None and not isinstance(held, Token):
            return held
        if not self.has_ended:
            raise NestedBackward
        raise ReplayMismatch(
            f"{self._frame.interceptor} gave a tensor to something outside it, such as a list, when it was replayed, "
            "and backward has reached that tensor. Return it, or store it in an attribute of the module.",
            type(self._frame.interceptor.module),
        )


class ReplayRun(_SecondRun):
    """A replay in progress, which handles module calls in this thread instead of the forward pass."""

    compiled = None if values.native is None else values.native.ReplayPack

    def __init__(self, frame: ReplayFrame, wanted: set[int], at: Callable[[int, Tensor], object]) -> None:
        self._frame, self._holds = frame, frame.call_context.mutable_state.holds
        self.handed_over: set[int] = set()
        self.fresh: dict[int, Tensor] = {}
        """Tensors saved by the operator in progress, by place. The operator may still write to them."""
        self._wanted, self._at = wanted, at
        self._last = max(wanted)
        self._nested = iter(frame.nested)
        self._place = -1
        self._operator, self._is_complete = -1, True
        """Sequence number that identifies the last operator that saved a tensor; True if the tensors that it saved are
        final.
        """
        self._inside_another = False

    def call(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an inner module call. If the inner call has a replay of its own, its tensor arguments are recorded
        instead of its saved tensors.
        """
        if self._inside_another or not (interceptor.replays or interceptor.is_left_alone):
            return interceptor.inner(*args, **kwargs)
        if not interceptor.is_left_alone:
            _, replayed = next(self._nested, (interceptor, False))
            if not replayed:
                return interceptor.inner(*args, **kwargs)
            for tensor in collect_call_tensors(args, kwargs):
                self.pack(tensor, is_complete=True)
        self._inside_another = True
        try:
            return interceptor.inner(*args, **kwargs)
        finally:
            self._inside_another = False

    def hand_over(self) -> None:
        """Pass the tensors in `fresh`, to which their operator has finished writing, to the function that receives
        saved tensors.
        """
        for place, tensor in self.fresh.items():
            self.handed_over.add(place)
            self._at(place, tensor)
        self.fresh.clear()

    @hidden_from_checkpoints
    @never_compiled
    def pack(self, tensor: Tensor, *, is_complete: bool = False) -> Tensor | Token | None:
        """Record a saved tensor; raise StopReplay when the last needed tensor is complete.

        An operator may write to a tensor after it has saved it, such as RReLU's noise; the tensor then has no `grad_fn`
        and is no view. Such a tensor is complete when the next operator saves one. `is_complete` is True for an
        argument of an inner call.
        """
        frame = self._frame
        if not self._inside_another:
            is_final, operator = True, next_sequence_number()  # of the next node, constant within one operator
            if is_complete or operator != self._operator:
                if self._place >= self._last:
                    raise StopReplay
                if self.fresh:
                    self.hand_over()
                self._operator, self._is_complete = operator, True
            if not (is_complete or tensor.grad_fn is not None or tensor.requires_grad or base_of(tensor) is not None):
                self._is_complete = False
                is_final = False
            self._place = place = self._place + 1
            if place in self._wanted:
                caught = frame.as_saved(place, tensor)
                if is_final:
                    self.handed_over.add(place)
                    self._at(place, caught)
                else:
                    self.fresh[place] = caught
            if place >= self._last and self._is_complete:
                raise StopReplay
        return self.hold(tensor) if self._holds or frame.held is not None else None


class AdvanceRun(_SecondRun):
    """An advance in progress: a run of a call's forward for its result alone, which records no saved tensors."""

    def __init__(self, frame: ReplayFrame) -> None:
        self._frame, self._holds = frame, frame.call_context.mutable_state.holds

    def call(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an inner module call and return its result."""
        return interceptor.inner(*args, **kwargs)

    @hidden_from_checkpoints
    @never_compiled
    def pack(self, tensor: Tensor) -> Tensor | Token | None:
        return self.hold(tensor)


if values.native is not None:
    values.native.lend(StopReplay=StopReplay)
