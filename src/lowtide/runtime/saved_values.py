"""Saved values and the handles that autograd holds on them.

A `Value` is one output of one autograd node in one step: kept, or recomputed when it is read. A `Handle` is one
reader's claim on a value: autograd holds one for each saved tensor, a recompute one for each operand, a replay one for
each argument. Handles only lead upstream and never to a node, so dropping the last one frees everything behind it: no
cycles, and nothing depends on which nodes backward has released already.

A recomputed value stays only until its last handle has read it, so one backward pass recomputes it at most once. The
next pass over a retained graph finds every handle unread again: reads are counted per pass.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from lowtide._torch.backward import backward_number
from lowtide._torch.compiled_code import never_compiled
from lowtide._torch.native_extension import load
from lowtide._torch.nodes import get_saved_slot, node_metadata
from lowtide.runtime.exposed_memory import EXPOSED, Contents
from lowtide.runtime.saved_fields import NEVER, changed_in_place, materialize

native: Any = load()
"""Module of the compiled hooks; None if the hooks in Python are used."""
if TYPE_CHECKING or native is None:
    from lowtide.runtime.saved_fields import HandleFields, ValueFields
else:
    HandleFields, ValueFields = native.HandleFields, native.ValueFields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor
    from torch.autograd.graph import Node

    from lowtide.runtime.call_interceptor import CallInterceptor
    from lowtide.runtime.engine import Engine
    from lowtide.runtime.operand_capture import CaptureSite

SEED_BYTES = 64
"""Largest size in bytes of a tensor without a node, such as a seed, that is kept although a replay could restore it.

On a GPU, attention kernels save their seeds even if they have drawn no numbers; the seeds are uninitialised then.
"""

KeptTensor = tuple["Tensor", int]
"""A saved tensor that is just kept, and its version: the packed form if no handle is needed."""


class Recomputation(Protocol):
    """Protocol of objects that make the tensor of a Value when backward reads it.

    `Recompute` runs a recipe, `ReplayFrame` and `Advance` run a module call again, `Offloaded` copies from the host.
    """

    @property
    def operands(self) -> Iterable[Handle | None]:
        """Return the operands, which have to be available before `make`."""

    def make(self, value: Value) -> Tensor:
        """Return the tensor of `value`; store other values recomputed with it by `Value.store_recomputed`."""


class Value(ValueFields):
    """One output of an autograd node in one step, or a tensor without `grad_fn`.

    It is kept as `tensor`; or its `maker` recomputes it, and `tensor` is None until then.
    """

    __slots__ = ("__weakref__",)

    @property
    def kept(self) -> bool:
        return self.maker is None

    @property
    def is_changed(self) -> bool:
        """Return True if the value was kept and has been changed in place since."""
        tensor = self.tensor
        if self.maker is not None or tensor is None or tensor._version == self.version:
            return False
        return self.version != EXPOSED or not _contents[self].are_in(tensor)

    def expose(self) -> None:
        """Record a checksum of the tensor, to compare before each read: autograd does not count all writes to it."""
        if self.version != EXPOSED and self.tensor is not None and not self.is_changed:
            _contents[self], self.version = Contents(self.tensor), EXPOSED

    def get(self) -> Tensor:
        """Return the tensor, recomputed if necessary. Raises RuntimeError if it was kept and then changed in place."""
        tensor = self.tensor
        if tensor is None:
            return materialize(self)
        if self.maker is None and tensor._version != self.version:
            raise RuntimeError(changed_in_place(tensor, self.version))
        return tensor

    def note_save(self, needed: set[int], ordinal: int) -> None:
        """Record that a call has saved the value as its tensor number `ordinal`.

        `needed` is the set of ordinals, of that call, that the hooks have to see in later runs.
        """
        if self.places is None:
            self.places = []
        self.places.append((needed, ordinal))

    def need(self) -> None:
        """Add each save of this value to its set of `note_save`, so that the hooks of later runs see it.

        This is called when a recompute is going to read the value.
        """
        for needed, ordinal in self.places or ():
            needed.add(ordinal)
        self.places = None

    def keep(self, tensor: Tensor) -> None:
        """Hold `tensor` (detached) from now on instead of recomputing it."""
        self.tensor, self.version, self.maker = tensor, tensor._version, None

    def store_recomputed(self, tensor: Tensor) -> None:
        """Store the recomputed tensor if a handle has not read it yet in this backward pass."""
        number = backward_number()
        if self.last_backward != number:
            self.last_backward, self.reads = number, 0
        if self.tensor is None and self.readers > self.reads:
            self.tensor = tensor


_contents: weakref.WeakKeyDictionary[Value, Contents] = weakref.WeakKeyDictionary()
"""Contents of the values whose version is `EXPOSED`, when their memory was exposed."""

NO_NODE = -1
"""Output number of a value that no node made."""


def make_value_without_grad_fn(tensor: Tensor) -> Value:
    """Return a Value that keeps `tensor`, which has no `grad_fn`."""
    value = Value(tensor.detach(), output=NO_NODE)
    if isinstance(tensor, nn.Parameter):
        value.leaf = id(tensor)
    return value


class Handle(HandleFields):
    """Reference of one reader to a Value, with the view of it that the reader gets.

    Autograd has a handle for each saved tensor, a recompute for each operand, a replay for each argument.
    """

    __slots__ = ("__weakref__",)

    value: Value

    def get_compared(self) -> Tensor:
        """Return the tensor as `get` does, but without comparing the contents of exposed memory: the caller has just
        compared them.
        """
        tensor, view = self.value.tensor, self.view
        if self.value.version != EXPOSED or tensor is None:
            return self.get()
        return tensor.as_strided(*view) if isinstance(view, tuple) else tensor if view is None else view

    def refer_to(self, value: Value) -> None:
        """Make the handle refer to `value` instead. Not for a handle that has been read."""
        self.value.readers -= 1
        self.value = value
        value.readers += 1

    def mark_unread(self) -> None:
        """Mark the handle as unread again, even if the recompute that reads it has run earlier in the same pass."""
        if self.last_backward != NEVER:
            if self.last_backward == self.value.last_backward:
                self.value.reads -= 1
            self.last_backward = NEVER


KEYS = tuple(("lowtide", output) for output in range(8))
"""Keys of node metadata for the first outputs of a node."""


def register(node: Node, output: int, value: Value) -> None:
    """Register `value` for an output of `node`, so that later readers find it. The node does not keep it alive."""
    node_metadata(node)[KEYS[output] if output < len(KEYS) else ("lowtide", output)] = weakref.ref(value)


def registered(node: Node, output: int) -> Value | None:
    """Return the Value that was registered for a node's output, if a handle still holds it; else None."""
    reference = node_metadata(node).get(KEYS[output] if output < len(KEYS) else ("lowtide", output))
    return None if reference is None else reference()


@never_compiled
def unpack_in_python(handle: Handle | KeptTensor) -> Tensor:
    """Return the tensor that was saved as `handle`: the unpack hook, for runs without compiled hooks."""
    global observer
    if isinstance(handle, tuple):
        tensor, version = handle
        if tensor._version != version:
            raise RuntimeError(changed_in_place(tensor, version))
        return tensor
    present = observer
    if present is None:
        return handle.get()
    if not present.has_packed(handle):
        observer = None  # the observer ignores recomputes for this handle, too
        try:
            return handle.get()
        finally:
            observer = present
    present.on_read(handle)
    tensor = handle.get()
    present.on_unpack(handle, tensor)
    return tensor


unpack: Callable[[Handle | KeptTensor], Tensor] = unpack_in_python if native is None else native.unpack
"""Unpack hook: return the tensor saved as `handle`."""
if native is not None:
    native.lend(
        Value=Value,
        Handle=Handle,
        observed=globals(),
        keys=KEYS,
        materialize=materialize,
        changed_in_place=changed_in_place,
        unpack_in_python=unpack_in_python,
        unpack=unpack,
        Parameter=nn.Parameter,
        strided=torch.Tensor.as_strided,
    )


def peek(node: Node, attribute: str) -> Any:
    """Return the content of a node's `attribute`, without a recompute and without running other hooks.

    For a saved tensor: the handle that Lowtide's pack hook returned, or the tensor itself if no handle was needed; None
    if it is not saved yet, was released, or was packed by other hooks. For a list of saved tensors: a tuple of such
    results. For a constant: the constant. Raises AttributeError if the node has no such attribute.
    """
    slot = get_saved_slot(node, attribute)
    if slot is None:
        return getattr(node, attribute)
    if isinstance(slot, tuple | list):
        return tuple(_read_content(item) for item in slot)
    return _read_content(slot)


def _read_content(slot: Any) -> Handle | Tensor | None:
    data = slot.data
    if slot.unpack_hook is unpack and type(data) is tuple:
        return data[0]  # type: ignore[no-any-return]
    ours = isinstance(data, Handle) or slot.unpack_hook is None
    return data if ours else None


class Observer:
    """Base class of observers of the events under one engine's plan; its methods do nothing.

    Rehearsals and the check of replays override them. A training loop has an observer only in its first steps.
    """

    engine: Engine

    def has_packed(self, handle: Handle) -> bool:
        """Return True if the observer knows this handle; reads of other handles are not reported to it."""
        return True

    def on_enter(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Observe that a module is about to run; `engine.here.scope` is its call."""

    def on_return(self, interceptor: CallInterceptor, result: Any) -> None:
        """Observe that a module call is about to return `result`."""

    def on_exit(self, interceptor: CallInterceptor) -> None:
        """Observe that a module call has ended, with a result or an exception."""

    def on_pack(self, handle: Handle, tensor: Tensor) -> None:
        """Observe that `tensor` was saved for backward, as `handle`."""

    def on_capture(self, place: CaptureSite, operand: Tensor) -> None:
        """Observe the capture, at `place`, of an operand that autograd does not record."""

    def on_sized_by_contents(self, operator: str) -> None:
        """Observe an operator whose memory depends on the contents of a tensor."""

    def on_read(self, handle: Handle) -> None:
        """Observe that backward is about to read a saved tensor."""

    def on_unpack(self, handle: Handle, tensor: Tensor) -> None:
        """Observe that the unpack hook is about to return `tensor` for `handle`."""

    def on_recompute_begin(self, maker: Recomputation) -> None:
        """Observe that the recompute or replay `maker` is about to run; its operands are available."""

    def on_recompute_end(self, maker: Recomputation, outputs: tuple[Tensor, ...]) -> None:
        """Observe the outputs of the recompute or replay `maker`, which has run."""

    def on_write_in_place(self, node: str, n_bytes: int) -> None:
        """Observe that a node named `node` will write its result over its incoming gradient of `n_bytes`."""


observer: Observer | None = None


def find_observer(engine: Engine) -> Observer | None:
    """Return the observer of the plan of `engine`; None if there is none."""
    return observer if observer is not None and observer.engine is engine else None
