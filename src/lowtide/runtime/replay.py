"""Replay of a module call, when backward first needs a tensor that the call saved.

Replays restore the tensors of operators without a recipe (decomposed activations, custom functions, random masks) and
of whole blocks. The second run sees exactly the state of the first one and leaves no trace (`call_context.py`,
`call_arguments.py`, `module_hooks.py`). It stops as soon as the last needed tensor is available, so that the products
at a block's end are not repeated; after a constant that the block made, at the next operator that saves a tensor.

Replays nest. The arguments of a replayed call inside another one are saved tensors of the outer one: its replay brings
them back, and the inner call's saved tensors are left to its own replay. Both runs number saved tensors alike.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lowtide._torch.compiled_code import never_compiled
from lowtide._torch.modes import hooks_but_in_transforms
from lowtide._torch.nodes import next_sequence_number
from lowtide._torch.privateuse1 import without_overrides
from lowtide._torch.tensors import base_of, storage_id
from lowtide.errors import ReplayMismatch
from lowtide.runtime import module_hooks as hooks
from lowtide.runtime import saved_values as values
from lowtide.runtime.call_arguments import Arguments, tensors_in_call
from lowtide.runtime.call_context import CallContext
from lowtide.runtime.fsdp_scopes import run_again
from lowtide.runtime.saved_fields import Geometry
from lowtide.runtime.saved_values import Handle, Value
from lowtide.runtime.tensor_writers import Overwritten
from lowtide.runtime.view_geometry import producer

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.runtime.call_interceptor import CallInterceptor


class _StopReplay(BaseException):
    """Signal that stops a replay. Not an Exception, so that no `except Exception` in a model catches it."""


class _NestedBackward(BaseException):
    """Signal that the call runs backward inside its forward and needs its saved tensors."""


_NOTHING = contextlib.nullcontext()

one_at_a_time = threading.RLock()
"""Lock, because a replay restores random numbers, flags and buffers, and backward may run in several threads."""


class ReplayFrame:
    """One call of a replayed module: its arguments, its context, and the values that it can bring back."""

    __slots__ = (
        "__weakref__",
        "_expected",
        "_listening",
        "_static",
        "arguments",
        "around",
        "call_context",
        "count",
        "held",
        "nested",
        "seam",
        "values",
    )  # fmt: skip

    def __init__(
        self,
        seam: CallInterceptor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hold: Callable[[Tensor], Handle],
        outer: ReplayFrame | None = None,
    ) -> None:
        self.seam = seam
        self.around: tuple[weakref.ref[ReplayFrame], ...] = () if outer is None else (weakref.ref(outer), *outer.around)
        """Frames of the outer calls, held weakly: they lead to tensors of their own."""
        self.arguments = Arguments(args, kwargs, hold)
        self.call_context = CallContext(seam.reach, self.arguments.devices, self.arguments.generators)
        self.count = 0
        """Number of tensors that the call has saved so far."""
        self.values: dict[int, weakref.ref[Value]] = {}
        """Values that a replay brings back, by their place among the saved tensors."""
        self.nested: list[tuple[CallInterceptor, bool]] = []
        """Inner calls that a plan may replay, in order, each with True if it did this time."""
        self.held: list[weakref.ref[Tensor | Token]] | None = None
        """In a trial: tensors that its runs save for a backward pass of their own. They outlive the run only if an
        object outside the call refers to some of them.
        """
        self._expected: dict[int, tuple[torch.Size, torch.dtype, Geometry | None]] = {}
        """For each place the shape and dtype of the saved tensor, and for a view the geometry of its base."""
        self._static: frozenset[int] | None = None
        self._listening = hooks.Listening(seam.reach.modules)

    def close(self) -> None:
        """End the call."""
        self._listening.stop()
        self.arguments.close()
        self.call_context.learn()

    def check_buffers(self) -> None:
        """Raise ReplayMismatch if the call, unlike all earlier ones, wrote to a large buffer: it can't be replayed."""
        if (name := self.call_context.written_late) is not None:
            raise ReplayMismatch(
                f"{self.seam} wrote to its buffer {name!r}, as it did in no step before: its plan runs it again in "
                "backward, where it would find other contents. The step ends, and nothing is updated.\n"
                "  Plan in a step in which it does: resume from a checkpoint, or have it write from the first step on.",
                type(self.seam.module),
            )

    def read(self, *, given: bool) -> list[tuple[Tensor, int]]:
        """Return the tensors that a replay reads, with their expected versions; if `given`, its arguments too."""
        arguments = (handle.value for handle in self.operands if given)
        return [
            *((tensor, version) for _, _, tensor, version in self.call_context.held),
            *self.call_context.attributes.tensors,
            *((value.tensor, value.version) for value in arguments if value.kept and value.tensor is not None),
        ]

    def is_held_outside(self) -> bool:
        """Return True if an object outside its runs refers to their tensors, recorded since `held` was set."""
        held = self.held or []
        if any(reference() is not None for reference in held):
            gc.collect()  # garbage of the runs may need a collection
        return any(reference() is not None for reference in held)

    @property
    def operands(self) -> tuple[Handle, ...]:
        return self.arguments.handles

    def value(self, tensor: Tensor, base: Tensor) -> Value:
        """Return a value of `base` that a replay brings back: `tensor`, a view of it or itself, was just saved."""
        value = Value()
        value.version = base._version
        self._bring_back(value, tensor, base)
        return value

    def adopt(self, value: Value, tensor: Tensor, base: Tensor, *, passing: bool) -> None:
        """Bring back a value that was left to the replay of an inner call, and is now saved outside that call.

        With `passing` the value was only an intermediate of other recomputes so far.
        """
        inside = isinstance(value.maker, ReplayFrame) and value.maker is not self and self.encloses(value.maker)
        if passing or inside:
            value.version = base._version
            self._bring_back(value, tensor, base)

    def _bring_back(self, value: Value, tensor: Tensor, base: Tensor) -> None:
        place = self.count - 1
        value.maker = self
        self.values[place] = weakref.ref(value)
        layout = None if base is tensor else (base.size(), base.stride(), int(base.storage_offset()))
        self._expected[place] = tensor.shape, tensor.dtype, layout

    def encloses(self, frame: ReplayFrame | None) -> bool:
        """Return True if `frame` is this one or belongs to an inner call."""
        return frame is self or (frame is not None and any(outer() is self for outer in frame.around))

    def is_static(self, tensor: Tensor) -> bool:
        """Return True if a tensor without history is the module's parameter or buffer, which stays in memory anyway."""
        if self._static is None:
            buffers = (b for module in self.seam.reach.modules for b in module._buffers.values() if b is not None)
            self._static = frozenset(storage_id(buffer) for buffer in buffers)
        return isinstance(tensor, torch.nn.Parameter) or storage_id(tensor) in self._static

    def make(self, value: Value) -> Tensor:
        """Run the call again, and store every value that an unread handle needs."""
        with one_at_a_time:
            if value.tensor is not None:  # another thread has made it in the meantime
                return value.tensor
            if values.probe is not None:
                values.probe.making(self)
            tensors = self.catch()
            if values.probe is not None:
                values.probe.made(self, tuple(tensors.values()))
            for place, tensor in tensors.items():
                there = self.values[place]()
                if there is value:
                    result = tensor
                if there is not None:
                    there.arrive(tensor)
            return result

    def catch(self) -> dict[int, Tensor]:
        """Return the tensors that the call saves in a second run, detached, for each place with a live value.

        Raises the errors of `look`.
        """
        tensors: dict[int, Tensor] = {}
        self.look(tensors.__setitem__)
        return tensors

    def look(self, at: Callable[[int, Tensor], object]) -> None:
        """Run the call again and pass each tensor that `catch` returns to `at`, once the operator that saves it is
        done.

        Raises ReplayMismatch if the call saves other tensors, RuntimeError if an argument, parameter or buffer has
        changed.
        """
        wanted = {place for place, reference in self.values.items() if reference() is not None}
        try:
            missing = self._run_again(wanted, at)
        except _NestedBackward:
            self.seam.reach.holds = True
            missing = self._run_again(wanted, at)
        if missing:
            raise ReplayMismatch(self._mismatch(min(missing), "nothing"), type(self.seam.module))

    def _run_again(self, wanted: set[int], at: Callable[[int, Tensor], object]) -> set[int]:
        """Run the call again; return the places at which no tensor was saved."""
        rerun = _ReplayRun(self, wanted, at)
        in_place = _in_place({inner for inner, _ in self.nested}) if self.nested else _NOTHING
        with in_place, contextlib.suppress(_StopReplay):
            self._run(rerun, self.operands)
        rerun.hand_over()
        return wanted - rerun.handed_over

    def forward_again(self, operands: tuple[Handle, ...] | None = None) -> Any:
        """Return the result of a second run, with arguments through `operands`, or through the frame's own handles."""
        operands = self.operands if operands is None else operands
        try:
            return self._run(_AdvanceRun(self), operands)
        except _NestedBackward:
            self.seam.reach.holds = True
            return self._run(_AdvanceRun(self), operands)

    def _run(self, rerun: _ReplayRun | _AdvanceRun, operands: tuple[Handle, ...]) -> Any:
        seam, reach = self.seam, self.seam.reach
        try:
            for value in [handle.value for handle in operands]:
                if value.is_changed:
                    assert value.tensor is not None
                    reach.is_overwritten = True
                    raise Overwritten(value.tensor, value.version, str(seam), type(seam.module))
            args, kwargs = self.arguments.again(operands)
            with (
                without_overrides(),
                run_again(reach.units) if reach.units else _NOTHING,
                self.call_context.again(),
                hooks.only(self._listening.acting, reach.modules),
                hooks_but_in_transforms(rerun.pack, rerun.unpack, seam.engine.apart),
            ):
                here = seam.engine.here
                before, here.now = here.now, rerun
                try:
                    return seam.inner(*args, **kwargs)
                finally:
                    here.now = before
                    rerun.end()
        except Overwritten as error:
            seam.engine.relied_on.give_up(error.storage)
            raise

    def as_saved(self, place: int, tensor: Tensor) -> Tensor:
        """Return the tensor for the value of a place, from the tensor saved there in the second run."""
        expected = self._expected.get(place)
        if expected is None:
            return producer(tensor)[0].detach()
        shape, dtype, layout = expected
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            raise ReplayMismatch(self._mismatch(place, f"{list(tensor.shape)} {tensor.dtype}"), type(self.seam.module))
        return tensor.detach() if layout is None else tensor.detach().as_strided(*layout)

    def _mismatch(self, place: int, now: str) -> str:
        expected = self._expected.get(place)
        was = "something" if expected is None else f"{list(expected[0])} {expected[1]}"
        return (
            f"{self.seam} saved {now} when it was run again, where it had saved {was} (tensor {place}). It reads "
            "something that has changed in between. Pass that as an argument, or store it in a buffer or an attribute."
        )


class Token:
    """Placeholder for a saved tensor of a trial run. It is never read; it is alive as long as the saved tensor would
    be.
    """

    __slots__ = ("__weakref__",)


class _Reexecution:
    """Second run of a call in progress. Its saved tensors are read only if it runs backward inside its forward."""

    idle: ClassVar[frozenset[CallInterceptor]] = frozenset()

    def __init__(self, frame: ReplayFrame) -> None:
        self._frame = frame
        self._holds = frame.seam.reach.holds
        self._has_ended = False

    def end(self) -> None:
        self._has_ended = True

    def hold(self, tensor: Tensor) -> Tensor | Token | None:
        held = tensor.detach() if self._holds else None if self._frame.held is None else Token()
        if self._frame.held is not None and held is not None:
            self._frame.held.append(weakref.ref(held))
        return held

    @never_compiled
    def unpack(self, held: Tensor | Token | None) -> Tensor:
        if held is not None and not isinstance(held, Token):
            return held
        if not self._has_ended:
            raise _NestedBackward
        raise ReplayMismatch(
            f"{self._frame.seam} gave a tensor to something outside of it, such as a list, when it was run again, and "
            "backward has reached that tensor. Return it, or store it in an attribute of the module.",
            type(self._frame.seam.module),
        )


class _ReplayRun(_Reexecution):
    """A replay in progress, the handler of module calls in this thread instead of the forward pass."""

    def __init__(self, frame: ReplayFrame, wanted: set[int], at: Callable[[int, Tensor], object]) -> None:
        super().__init__(frame)
        self.handed_over: set[int] = set()
        self._fresh: dict[int, Tensor] = {}
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

    def call(self, seam: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an inner module call."""
        if self._inside_another or not (seam.replays or seam.is_left_alone):
            return seam.inner(*args, **kwargs)
        if not seam.is_left_alone:
            _, replayed = next(self._nested, (seam, False))
            if not replayed:
                return seam.inner(*args, **kwargs)
            for tensor in tensors_in_call(args, kwargs):
                self._catch(tensor, is_complete=True)
        self._inside_another = True
        try:
            return seam.inner(*args, **kwargs)
        finally:
            self._inside_another = False

    def hand_over(self) -> None:
        """Pass on the tensors saved so far, which are complete."""
        for place in list(self._fresh):
            self.hand_over_one(place)

    def hand_over_one(self, place: int) -> None:
        """Pass on the tensor of one place."""
        self.handed_over.add(place)
        self._at(place, self._fresh.pop(place))

    @never_compiled
    def pack(self, tensor: Tensor) -> Tensor | Token | None:
        if not self._inside_another:
            self._catch(tensor)
        return self.hold(tensor)

    def _catch(self, tensor: Tensor, *, is_complete: bool = False) -> None:
        """Record a saved tensor, and stop after the last one, or after the operator that saved it.

        A tensor that an operator is to write, such as RReLU's noise, is saved before it is written. Then it has no
        history, and is no view.
        """
        operator = next_sequence_number()  # number of the next node, which is constant within one operator
        if is_complete or operator != self._operator:
            if self._place >= self._last:
                raise _StopReplay
            if self._fresh:
                self.hand_over()
            self._operator, self._is_complete = operator, True
        is_complete |= tensor.grad_fn is not None or tensor.requires_grad or base_of(tensor) is not None
        self._is_complete &= is_complete
        self._place += 1
        if self._place in self._wanted:
            self._fresh[self._place] = self._frame.as_saved(self._place, tensor)
            if is_complete:
                self.hand_over_one(self._place)
        if self._place >= self._last and self._is_complete:
            raise _StopReplay


class _AdvanceRun(_Reexecution):
    """An advance in progress, which records no saved tensors."""

    def call(self, seam: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an inner module call."""
        return seam.inner(*args, **kwargs)

    @never_compiled
    def pack(self, tensor: Tensor) -> Tensor | Token | None:
        return self.hold(tensor)


def _in_place(seams: set[CallInterceptor]) -> contextlib.AbstractContextManager[None]:
    """Keep a plan's interceptors installed in the block, even if the plan was removed between forward and backward."""
    removed = [seam for seam in seams if not seam.installed]
    return _installed(removed) if removed else contextlib.nullcontext()


@contextlib.contextmanager
def _installed(removed: list[CallInterceptor]) -> Iterator[None]:
    for seam in removed:
        seam.install()
    try:
        yield
    finally:
        for seam in removed:
            seam.remove()
