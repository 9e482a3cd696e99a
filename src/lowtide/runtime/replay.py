"""A module call that is run again when backward first needs what it saved.

For what has no recipe: decomposed activations, custom functions, random masks; and for the insides of whole blocks.
The second run sees exactly what the first one saw and leaves no trace (`call_context.py`, `call_arguments.py`,
`module_hooks.py`). It stops as soon as the last tensor that somebody waits for is there, so that the products at a
block's end are not redone; after a constant that the block made, with the next operator that saves something.

Replays nest. The arguments of a replayed call inside of another one are saved tensors of the outer one: its replay
brings them back, and what the inner call saved is left to the inner call's own. Places are counted alike in both runs.
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
from lowtide._torch.privateuse1 import without_aside
from lowtide._torch.tensors import base_of, storage_id
from lowtide.errors import ReplayMismatch
from lowtide.runtime import module_hooks as hooks
from lowtide.runtime import saved_values as values
from lowtide.runtime.call_arguments import Arguments, tensors_in_call
from lowtide.runtime.call_context import CallContext
from lowtide.runtime.fsdp_scopes import run_again
from lowtide.runtime.saved_values import Geometry, Handle, Value
from lowtide.runtime.tensor_writers import Overwritten
from lowtide.runtime.view_geometry import producer

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.runtime.call_interceptor import CallInterceptor


class _StopReplay(BaseException):
    """Stops a replay. Not an Exception, so that no `except Exception` in a model catches it."""


class _NestedBackward(BaseException):
    """The call runs backward inside of its forward and needs what it saved."""


one_at_a_time = threading.RLock()
"""Random numbers, flags and buffers are set back for a replay, and backward may run in several threads."""


class ReplayFrame:
    """One call of a replayed module: what it was given, what it saw, and the values that it can bring back."""

    __slots__ = (
        "__weakref__",
        "_expected",
        "_listening",
        "_static",
        "arguments",
        "around",
        "count",
        "held",
        "nested",
        "seam",
        "surroundings",
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
        """The frames of the calls around it, which it does not hold: they lead to tensors of their own."""
        self.arguments = Arguments(args, kwargs, hold)
        self.surroundings = CallContext(seam.reach, self.arguments.devices, self.arguments.generators)
        self.count = 0
        """Tensors saved since the call began."""
        self.values: dict[int, weakref.ref[Value]] = {}
        """What a replay brings back, by its place among the saved tensors."""
        self.nested: list[tuple[CallInterceptor, bool]] = []
        """The calls inside that a plan replays at some time, in order, and whether it did this time."""
        self.held: list[weakref.ref[Tensor | Token]] | None = None
        """On trial: what its runs save for a backward pass of their own. Nothing of that outlives the run, unless
        something outside of the call has been given a part of it."""
        self._expected: dict[int, tuple[torch.Size, torch.dtype, Geometry | None]] = {}
        """What is saved at a place: its shape, and for a view the geometry of its base."""
        self._static: frozenset[int] | None = None
        self._listening = hooks.Listening(seam.reach.modules)

    def close(self) -> None:
        """The call is over."""
        self._listening.stop()
        self.arguments.close()
        self.surroundings.learn()

    def check_buffers(self) -> None:
        """Raise ReplayMismatch if the call wrote to a large buffer as none before it: it can't be run again now."""
        if (name := self.surroundings.written_late) is not None:
            raise ReplayMismatch(
                f"{self.seam} wrote to its buffer {name!r}, as it did in no step before: its plan runs it again in "
                "backward, where it would find other contents. The step ends, and nothing is updated.\n"
                "  Plan in a step in which it does: resume from a checkpoint, or have it write from the first step on.",
                type(self.seam.module),
            )

    def read(self, *, given: bool) -> list[tuple[Tensor, int]]:
        """Tensors that a replay reads, with the versions that it wants; if `given`, those of its arguments, too."""
        arguments = (handle.value for handle in self.operands if given)
        return [
            *((tensor, version) for _, _, tensor, version in self.surroundings.held),
            *self.surroundings.attributes.tensors,
            *((value.tensor, value.version) for value in arguments if value.kept and value.tensor is not None),
        ]

    def is_held_outside(self) -> bool:
        """Whether what its runs made, since `held` is noted, is referred to by something outside of them."""
        held = self.held or []
        if any(reference() is not None for reference in held):
            gc.collect()  # what a run leaves may wait for that
        return any(reference() is not None for reference in held)

    @property
    def operands(self) -> tuple[Handle, ...]:
        return self.arguments.handles

    def value(self, tensor: Tensor, base: Tensor) -> Value:
        """The value of `base`, to be brought back: `tensor`, a view of it or itself, has just been saved."""
        value = Value()
        value.version = base._version
        self._bring_back(value, tensor, base)
        return value

    def adopt(self, value: Value, tensor: Tensor, base: Tensor, *, passing: bool) -> None:
        """Bring back what was left to the replay of a call inside, and is now saved outside of that.

        Or what so far was only made on the way to something else.
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
        """Whether `frame` is this one or one of a call inside of this one's."""
        return frame is self or (frame is not None and any(outer() is self for outer in frame.around))

    def is_static(self, tensor: Tensor) -> bool:
        """Whether a tensor without history is a parameter or a buffer of the module: there anyway."""
        if self._static is None:
            buffers = (b for module in self.seam.reach.modules for b in module._buffers.values() if b is not None)
            self._static = frozenset(storage_id(buffer) for buffer in buffers)
        return isinstance(tensor, torch.nn.Parameter) or storage_id(tensor) in self._static

    def make(self, value: Value) -> Tensor:
        """Run the call again; every value that somebody waits for is there afterwards."""
        with one_at_a_time:
            if value.tensor is not None:  # another thread was faster
                return value.tensor
            if values.probe is not None:
                values.probe.making(self)
            found = self.catch()
            if values.probe is not None:
                values.probe.made(self, tuple(found.values()))
            for place, tensor in found.items():
                there = self.values[place]()
                if there is value:
                    result = tensor
                if there is not None:
                    there.arrive(tensor)
            return result

    def catch(self) -> dict[int, Tensor]:
        """What the call saves when it is run again, detached, for each place that somebody still holds.

        Raises as `look` does.
        """
        found: dict[int, Tensor] = {}
        self.look(found.__setitem__)
        return found

    def look(self, at: Callable[[int, Tensor], object]) -> None:
        """Run the call again and give `at` what it saves, as `catch` has it, when the operator that saves it is over.

        Raises ReplayMismatch if it saves something else, RuntimeError if an argument, parameter or buffer has changed.
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
        """Run it, and give the places that nothing was saved at."""
        rerun = _ReplayRun(self, wanted, at)
        with _in_place({inner for inner, _ in self.nested}), contextlib.suppress(_StopReplay):
            self._run(rerun, self.operands)
        rerun.hand_over()
        return wanted - rerun.found

    def forward_again(self, operands: tuple[Handle, ...] | None = None) -> Any:
        """What the call returns when it is run again, through claims on its arguments: the caller's own if given."""
        operands = self.operands if operands is None else operands
        try:
            return self._run(_AdvanceRun(self), operands)
        except _NestedBackward:
            self.seam.reach.holds = True
            return self._run(_AdvanceRun(self), operands)

    def _run(self, rerun: _ReplayRun | _AdvanceRun, operands: tuple[Handle, ...]) -> Any:
        seam = self.seam
        for value in (handle.value for handle in operands):
            if value.is_changed:
                assert value.tensor is not None
                seam.reach.is_overwritten = True
                raise Overwritten(value.tensor, value.version, str(seam), type(seam.module))
        args, kwargs = self.arguments.again(operands)
        with (
            without_aside(),
            run_again(seam.reach.units) if seam.reach.units else contextlib.nullcontext(),
            self.surroundings.again(),
            hooks.only(self._listening.acting, seam.reach.modules),
            hooks_but_in_transforms(rerun.pack, rerun.unpack, seam.engine.apart),
        ):
            here = seam.engine.here
            before, here.now = here.now, rerun
            try:
                return seam.inner(*args, **kwargs)
            finally:
                here.now = before
                rerun.end()

    def as_saved(self, place: int, tensor: Tensor) -> Tensor:
        """What the value of a place is to be, from what was saved there in the second run."""
        expected = self._expected.get(place)
        if expected is None:
            return producer(tensor)[0].detach()
        shape, dtype, layout = expected
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            raise ReplayMismatch(self._mismatch(place, f"{list(tensor.shape)} {tensor.dtype}"), type(self.seam.module))
        return tensor.detach() if layout is None else tensor.detach().as_strided(*layout)

    def _mismatch(self, place: int, found: str) -> str:
        expected = self._expected.get(place)
        was = "something" if expected is None else f"{list(expected[0])} {expected[1]}"
        return (
            f"{self.seam} saved {found} when it was run again, where it had saved {was} (tensor {place}). It reads "
            "something that has changed in between. Let it have that as an argument, a buffer or an attribute."
        )


class Token:
    """A place holder for a saved tensor of a run on trial, which nothing reads: it may only outlive the run."""

    __slots__ = ("__weakref__",)


class _Reexecution:
    """A second run in progress. What it saves nobody reads, unless it runs backward inside of its forward."""

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
            "backward has come to that. Have it returned or put in attributes of the module.",
            type(self._frame.seam.module),
        )


class _ReplayRun(_Reexecution):
    """A replay in progress. Modules that are called in this thread meanwhile ask it, not the forward pass."""

    def __init__(self, frame: ReplayFrame, wanted: set[int], at: Callable[[int, Tensor], object]) -> None:
        super().__init__(frame)
        self.found: set[int] = set()
        self._fresh: dict[int, Tensor] = {}
        """What the operator in progress has saved: it may yet be written to."""
        self._wanted, self._at = wanted, at
        self._last = max(wanted)
        self._nested = iter(frame.nested)
        self._place = -1
        self._operator, self._is_complete = -1, True
        """The operator that saved something last, by the number that the next node would have, and whether nothing of
        that can be changed any longer."""
        self._inside_another = False

    def call(self, seam: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module is called."""
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
        """What was saved so far is complete."""
        self.found |= self._fresh.keys()
        while self._fresh:
            self._at(*self._fresh.popitem())

    @never_compiled
    def pack(self, tensor: Tensor) -> Tensor | Token | None:
        if not self._inside_another:
            self._catch(tensor)
        return self.hold(tensor)

    def _catch(self, tensor: Tensor, *, is_complete: bool = False) -> None:
        """Stop at the last one, or with the operator that saved it: what an operator is to write, as RReLU its noise,
        is saved before it is written. Then it has no history, and is no view.
        """
        operator = next_sequence_number()  # of the next node, so that it is the same in one operator
        if is_complete or operator != self._operator:
            if self._place >= self._last:
                raise _StopReplay
            self.hand_over()
            self._operator, self._is_complete = operator, True
        has_history = tensor.grad_fn is not None or tensor.requires_grad or base_of(tensor) is not None
        self._is_complete &= is_complete or has_history
        self._place += 1
        if self._place in self._wanted:
            self._fresh[self._place] = self._frame.as_saved(self._place, tensor)
        if self._place >= self._last and self._is_complete:
            raise _StopReplay


class _AdvanceRun(_Reexecution):
    """An advance in progress: nothing is caught."""

    def call(self, seam: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module is called."""
        return seam.inner(*args, **kwargs)

    @never_compiled
    def pack(self, tensor: Tensor) -> Tensor | Token | None:
        return self.hold(tensor)


def _in_place(seams: set[CallInterceptor]) -> contextlib.AbstractContextManager[None]:
    """Seams that a plan put into modules are there, also if the plan has been removed between forward and backward."""
    gone = [seam for seam in seams if not seam.installed]
    return _installed(gone) if gone else contextlib.nullcontext()


@contextlib.contextmanager
def _installed(gone: list[CallInterceptor]) -> Iterator[None]:
    for seam in gone:
        seam.install()
    try:
        yield
    finally:
        for seam in gone:
            seam.remove()
