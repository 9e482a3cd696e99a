"""Replay of a module call, when backward first needs a tensor that the call saved.

Replays restore the tensors of operators without a recipe (decomposed activations, custom functions, random masks) and
of whole blocks. The second run sees exactly the state of the first one and leaves no trace (`call_context.py`,
`call_arguments.py`, `module_hooks.py`). It stops as soon as the last needed tensor is available, so that the matrix
products at a block's end are not repeated. If no node made that tensor, its operator may still write to it: then the
second run stops at the next operator that saves a tensor.

Replays nest. The arguments of a replayed call inside another one are saved tensors of the outer one: its replay brings
them back, and the inner call's saved tensors are left to its own replay. Both runs number saved tensors alike.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch.modes import (
    begin_off_in_transforms,
    end_off_in_transforms,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
)
from lowtide._torch.nodes import node_metadata
from lowtide._torch.privateuse1 import are_overrides_on, without_overrides
from lowtide._torch.tensors import base_of, get_storage_id
from lowtide.errors import ReplayMismatch
from lowtide.runtime import module_hooks as hooks
from lowtide.runtime import saved_values as values
from lowtide.runtime.call_arguments import Arguments
from lowtide.runtime.call_context import CallContext, StateAtCall
from lowtide.runtime.fsdp_scopes import run_again
from lowtide.runtime.replay_run import AdvanceRun, NestedBackward, ReplayRun, StopReplay, Token
from lowtide.runtime.saved_fields import Geometry
from lowtide.runtime.saved_values import KEYS, Handle, Value
from lowtide.runtime.tensor_writers import Overwritten
from lowtide.runtime.view_geometry import find_base_node_and_view

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.runtime.call_context import MutableState
    from lowtide.runtime.call_interceptor import CallInterceptor


one_at_a_time = threading.RLock()
"""Lock, because a replay restores random numbers, flags and buffers, and backward may run in several threads."""


class ReplayFrame:
    """One call of a replayed module: its arguments, the state that it reads, and the tensors that a replay restores."""

    __slots__ = (
        "__weakref__",
        "_expected",
        "_hook_recorder",
        "_static",
        "arguments",
        "around",
        "call_context",
        "count",
        "held",
        "interceptor",
        "nested",
        "operands",
        "values",
    )  # fmt: skip

    def __init__(
        self,
        interceptor: CallInterceptor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hold: Callable[[Tensor], Handle],
        outer: ReplayFrame | None = None,
        mutable_state: MutableState | None = None,
    ) -> None:
        """Record the beginning of a call of the interceptor's module.

        `hold` returns a handle on a tensor among the arguments; `outer` is the frame of a replayed call around this
        one. `mutable_state` is the module's state if its method `as_known` has just been called; None otherwise.
        """
        self.interceptor = interceptor
        self.around: tuple[weakref.ref[ReplayFrame], ...] = () if outer is None else (weakref.ref(outer), *outer.around)
        """Frames of the outer calls, the innermost first; weak references, because frames hold tensors."""
        known = None if mutable_state is None else mutable_state.known
        mutable_state = interceptor.mutable_state if mutable_state is None else mutable_state
        self.arguments = arguments = Arguments(args, kwargs, hold)
        self.operands = arguments.handles
        self.call_context = CallContext(mutable_state, arguments.devices, arguments.generators, known)
        self.count = 0
        """Number of tensors that the call has saved so far."""
        self.values: dict[int, weakref.ref[Value]] = {}
        """Values whose tensors a replay restores, by their ordinal among the tensors that the call saved."""
        self.nested: list[tuple[CallInterceptor, bool]] = []
        """Inner calls that a plan may replay, in order, each with True if the plan replays it this time."""
        self.held: list[weakref.ref[Tensor | Token]] | None = None
        """In a trial: tensors that its runs save for a backward pass of their own. They outlive the run only if an
        object outside the call refers to some of them.
        """
        self._expected: dict[int, tuple[torch.Size, torch.dtype, Geometry | None]] = {}
        """By the same ordinals, the shape and dtype of the saved tensor, and for a view the geometry of its base."""
        self._static: frozenset[int] | None = None
        self._hook_recorder = None if known is not None else hooks.HookRecorder(mutable_state.modules)
        """None for modules without hooks."""

    def close(self) -> None:
        """Record the end of the call: stop observing its hooks, and learn which state the call has changed."""
        if self._hook_recorder is not None:
            self._hook_recorder.stop()
        self.arguments.close()
        context = self.call_context
        if context.known is None or context.mutable_state.written is None:
            context.learn()
        context.random.end_call()

    def check_buffers(self) -> None:
        """Raise ReplayMismatch if the call wrote to a large buffer that no earlier call of the module wrote to.

        Large buffers that earlier calls did not write to are not copied, so a replay would read the new contents.
        """
        if (name := self.call_context.written_late) is not None:
            raise ReplayMismatch(
                f"{self.interceptor} wrote to its buffer {name!r} for the first time since the plan was made. The plan "
                "replays the block in backward, where the buffer would have other contents, so the step ends before "
                "its update.\n  Let the block write to the buffer from the first step on, or make the plan in a step "
                "in which it does (for example after resuming from a checkpoint).",
                type(self.interceptor.module),
            )

    def list_read_tensors(self, *, with_arguments: bool) -> list[tuple[Tensor, int]]:
        """Return the tensors that a replay reads, with their expected versions; `with_arguments` adds the arguments."""
        arguments = (handle.value for handle in self.operands if with_arguments)
        return [
            *self.call_context.uncopied.with_versions,
            *self.call_context.attributes.tensors,
            *((value.tensor, value.version) for value in arguments if value.kept and value.tensor is not None),
        ]

    @property
    def is_awaited(self) -> bool:
        """Return True until a replay has restored all tensors of the call that backward needs."""
        values = [reference() for reference in self.values.values()]
        return not values or any(value is not None and value.tensor is None for value in values)

    def is_held_outside(self) -> bool:
        """Return True if an object outside the call still refers to a tensor that trial runs of the call have saved."""
        held = self.held or []
        if any(reference() is not None for reference in held):
            gc.collect()  # garbage of the runs may need a collection
        return any(reference() is not None for reference in held)

    def pack_result(self, tensor: Tensor) -> Handle | None:
        """Return a handle on `tensor`, an operator's result that the call saves; the replay restores it, unless it is
        kept already.

        This is the fast path for most saved tensors. Returns None for views, leaves and other cases, which
        `SavedTensorPacker.hold` handles.
        """
        node = tensor.grad_fn
        if node is None or base_of(tensor) is not None or (output := tensor.output_nr) >= len(KEYS):
            return None
        metadata, key, version = node_metadata(node), KEYS[output], tensor._version
        reference = metadata.get(key)
        value = None if reference is None else reference()
        if value is not None:
            is_usable = value.version in (version, -1) and not value.is_intermediate and value.places is None
            if not (is_usable and (value.maker is None or value.maker is self)):
                return None
            self.count += 1
            return Handle(value)
        value = Value(maker=self, output=output)
        value.version = version
        place = self.count
        self.count = place + 1
        self.values[place] = metadata[key] = weakref.ref(value)
        self._expected[place] = tensor.shape, tensor.dtype, None
        return Handle(value)

    def value(self, tensor: Tensor, base: Tensor) -> Value:
        """Return a Value whose tensor a replay restores: `base`, which is the saved `tensor` or the base of that
        view.
        """
        value = Value()
        value.version = base._version
        self._restore_by_replay(value, tensor, base)
        return value

    def take_over(self, value: Value, tensor: Tensor, base: Tensor, *, is_intermediate: bool) -> None:
        """Let this replay restore `value`, which this call now saves as `tensor`, a view of `base` or `base` itself.

        This is done if the replay of an inner call was to restore the value so far, or if only recomputes have read it
        (`is_intermediate`). Otherwise nothing changes.
        """
        inside = isinstance(value.maker, ReplayFrame) and value.maker is not self and self.encloses(value.maker)
        if is_intermediate or inside:
            value.version = base._version
            self._restore_by_replay(value, tensor, base)

    def _restore_by_replay(self, value: Value, tensor: Tensor, base: Tensor) -> None:
        place = self.count - 1
        value.maker = self
        self.values[place] = weakref.ref(value)
        layout = None if base is tensor else (base.size(), base.stride(), int(base.storage_offset()))
        self._expected[place] = tensor.shape, tensor.dtype, layout

    def encloses(self, frame: ReplayFrame | None) -> bool:
        """Return True if `frame` is this frame, or that of a call inside this call."""
        return frame is self or (frame is not None and any(outer() is self for outer in frame.around))

    def is_static(self, tensor: Tensor) -> bool:
        """Return True if `tensor`, which has no `grad_fn`, is a parameter or buffer of the module."""
        if self._static is None:
            tables = (module._buffers for module in self.interceptor.mutable_state.modules)
            buffers = (buffer for table in tables for buffer in table.values() if buffer is not None)
            self._static = frozenset(map(get_storage_id, buffers))
        return isinstance(tensor, torch.nn.Parameter) or get_storage_id(tensor) in self._static

    def make(self, value: Value) -> Tensor:
        """Run the call again and return the tensor of `value`; store the other restored tensors that are still
        needed.
        """
        with one_at_a_time:
            if value.tensor is not None:  # another thread has recomputed it in the meantime
                return value.tensor
            if values.observer is not None:
                values.observer.on_recompute_begin(self)
            tensors: dict[int, Tensor] = {}
            self.visit_saved(tensors.__setitem__, is_only_missing=True)
            if values.observer is not None:
                values.observer.on_recompute_end(self, tuple(tensors.values()))
            for place, tensor in tensors.items():
                there = self.values[place]()
                if there is value:
                    result = tensor
                if there is not None:
                    there.store_recomputed(tensor)
            return result

    def collect_saved(self) -> dict[int, Tensor]:
        """Run the call again; return the tensors that it saves, detached, by their number among the saved tensors.

        Only tensors whose Value is alive, because a handle refers to it, are returned. Raises the errors of
        `visit_saved`.
        """
        tensors: dict[int, Tensor] = {}
        self.visit_saved(tensors.__setitem__)
        return tensors

    def visit_saved(self, at: Callable[[int, Tensor], object], *, is_only_missing: bool = False) -> None:
        """Run the call again, and call `at(place, tensor)` for each saved tensor once the operator that saves it is
        done.

        `place` is the tensor's number among the saved tensors. Tensors whose Value has been freed are left out; with
        `is_only_missing`, so are those whose Value holds a tensor. The run ends after the last remaining one.

        Raises ReplayMismatch if the call saves other tensors than in its first run, RuntimeError if an argument,
        parameter or buffer has changed.
        """
        wanted = {
            place
            for place, reference in self.values.items()
            if (value := reference()) is not None and (value.tensor is None or not is_only_missing)
        }
        value = None  # the run may free it
        try:
            missing = self._run_again(wanted, at)
        except NestedBackward:
            self.interceptor.mutable_state.holds = True
            missing = self._run_again(wanted, at)
        if missing:
            raise ReplayMismatch(self._describe_mismatch(min(missing), "nothing"), type(self.interceptor.module))

    def _run_again(self, wanted: set[int], at: Callable[[int, Tensor], object]) -> set[int]:
        """Run the call again; return those of the `wanted` places at which no tensor was saved."""
        rerun = ReplayRun(self, wanted, at)
        try:
            if self.nested:
                with _kept_installed({inner for inner, _ in self.nested}):
                    self._run(rerun, self.operands)
            else:
                self._run(rerun, self.operands)
        except StopReplay:
            pass
        except Overwritten as error:
            self.interceptor.engine.relied_on.give_up(error.storage)
            raise
        if rerun.fresh:
            rerun.hand_over()
        return wanted - rerun.handed_over

    def run_forward_again(self, operands: tuple[Handle, ...] | None = None) -> Any:
        """Run the call again only for its result, and return that. Arguments are read from `operands`, by default the
        frame's own handles.
        """
        operands = self.operands if operands is None else operands
        try:
            return self._run(AdvanceRun(self), operands)
        except NestedBackward:
            self.interceptor.mutable_state.holds = True
            return self._run(AdvanceRun(self), operands)

    def _run(self, rerun: ReplayRun | AdvanceRun, operands: tuple[Handle, ...]) -> Any:
        interceptor, units = self.interceptor, self.call_context.mutable_state.units
        for handle in operands:
            value = handle.value
            tensor = value.tensor
            if value.maker is None and tensor is not None and tensor._version != value.version and value.is_changed:
                self.call_context.mutable_state.is_overwritten = True
                raise Overwritten(tensor, value.version, str(interceptor), type(interceptor.module))
        args, kwargs = self.arguments.rebuild(operands)
        if not (units or are_overrides_on()):
            return self._run_here(rerun, args, kwargs)
        with without_overrides(), run_again(units):
            return self._run_here(rerun, args, kwargs)

    def _run_here(self, rerun: ReplayRun | AdvanceRun, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        engine = self.interceptor.engine
        here = engine.here
        with StateAtCall(self.call_context, () if self._hook_recorder is None else self._hook_recorder.acting):
            unpack = rerun.unpack  # bound once: transforms recognise the hooks by this object
            begin_off_in_transforms(unpack, engine.without_plan)
            push_saved_tensor_hooks(rerun.compiled(rerun, rerun.pack) if rerun.compiled else rerun.pack, unpack)
            before, here.handler = here.handler, rerun
            try:
                return self.interceptor.inner(*args, **kwargs)
            finally:
                here.handler = before
                rerun.has_ended = True
                pop_saved_tensor_hooks()
                end_off_in_transforms()

    def as_saved(self, place: int, tensor: Tensor) -> Tensor:
        """Return the tensor to store for `tensor`, which a replay saved at `place`.

        It is `tensor` itself, detached, or its base if the first run saved a view.

        Raises ReplayMismatch if the shape or dtype is not that of the first run.
        """
        expected = self._expected.get(place)
        if expected is None:
            return find_base_node_and_view(tensor)[0].detach()
        shape, dtype, layout = expected
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            raise ReplayMismatch(
                self._describe_mismatch(place, f"{list(tensor.shape)} {tensor.dtype}"), type(self.interceptor.module)
            )
        return tensor.detach() if layout is None else tensor.detach().as_strided(*layout)

    def _describe_mismatch(self, place: int, now: str) -> str:
        expected = self._expected.get(place)
        was = "something" if expected is None else f"{list(expected[0])} {expected[1]}"
        return (
            f"{self.interceptor} saved {now} when it was replayed, where it had saved {was} (tensor {place}). It reads "
            "something that has changed in between. Pass that as an argument, or store it in a buffer or an attribute."
        )


def _kept_installed(interceptors: set[CallInterceptor]) -> contextlib.AbstractContextManager[None]:
    """Keep a plan's interceptors installed in the block, even if the plan was removed between forward and backward."""
    removed = [interceptor for interceptor in interceptors if not interceptor.installed]
    return _installed(removed) if removed else contextlib.nullcontext()


@contextlib.contextmanager
def _installed(removed: list[CallInterceptor]) -> Iterator[None]:
    for interceptor in removed:
        interceptor.install()
    try:
        yield
    finally:
        for interceptor in removed:
            interceptor.remove()
