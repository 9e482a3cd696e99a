"""What a saved tensor is packed into.

A `Value` is one output of one autograd node in one step: kept, or made again when it is read. A `Handle` is one
reader's claim on a value: autograd holds one for each saved tensor, a recompute one for each operand, a replay one for
each argument. Handles only lead upstream and never to a node, so dropping the last one frees everything behind it: no
cycles, and nothing depends on which nodes backward has released already.

A value that is made again stays only while somebody waits for it, so one backward pass makes it at most once. The next
pass over a retained graph finds every handle unread again: reads are counted per pass.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from lowtide._torch.backward import backward_number
from lowtide._torch.compiled_code import never_compiled
from lowtide._torch.nodes import node_metadata, saved_slot

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import Tensor
    from torch.autograd.graph import Node

    from lowtide.runtime.call_interceptor import CallInterceptor
    from lowtide.runtime.engine import Engine
    from lowtide.runtime.operand_capture import CaptureSite

Geometry = tuple["torch.Size", tuple[int, ...], int]
"""Size, stride and storage offset of a view, in elements."""

SEED_BYTES = 64
"""A tensor that no node made and that is no larger is kept where a replay could bring it back: seeds and the like. On a
GPU attention's kernels save theirs whether they have drawn numbers or not; if not, nobody has written into them."""

ReachableObjects = tuple["Tensor", int]
"""A saved tensor that is just kept, and its version: what is packed where nothing else needs the value."""

_NEVER = -2
"""No pass: backward numbers its passes from 0, and outside of any the number is -1."""


class Recomputation(Protocol):
    """What brings a value back: a recompute from a recipe, or the replay of a module call."""

    @property
    def operands(self) -> Iterable[Handle | None]:
        """What has to be there first."""

    def make(self, value: Value) -> Tensor:
        """The value's tensor. Other values that come with it `arrive`."""


class Value:
    """One output of one autograd node in one step; also a leaf or another tensor without history."""

    __slots__ = (
        "__weakref__",
        "leaf",
        "maker",
        "original",
        "output",
        "partial",
        "passing",
        "places",
        "readers",
        "reads",
        "seen",
        "tensor",
        "version",
    )  # fmt: skip

    def __init__(self, tensor: Tensor | None = None, *, maker: Recomputation | None = None, output: int = 0) -> None:
        self.tensor = tensor
        self.version = -1 if tensor is None else tensor._version
        """The tensor's version when it was saved; -1 if none was at hand."""
        self.maker = maker
        self.output = output
        self.passing = False
        """Whether nobody but recomputes was ever given it."""
        self.partial = False
        """Whether it is, or will be, no more than what is enough for its reader: nothing else can be made of it."""
        self.leaf = 0
        """`id` of the parameter that this is; 0 for anything else."""
        self.original: weakref.ref[Tensor] | None = None
        """The tensor that this is of, if it is read by a recompute and autograd has not saved it for that."""
        self.places: list[tuple[set[int], int]] | None = None
        """The needed ordinals of calls that are being learnt, and this value's ordinal there: see `need`."""
        self.readers = 0
        """Handles that there are."""
        self.reads = 0
        """How many of them were read in the backward pass `seen`."""
        self.seen = _NEVER

    @property
    def kept(self) -> bool:
        return self.maker is None

    @property
    def is_changed(self) -> bool:
        """Whether it was kept and changed in place since."""
        return self.maker is None and self.tensor is not None and self.tensor._version != self.version

    def get(self) -> Tensor:
        """The tensor, made again if it is not there. Raises RuntimeError if it was kept and changed in place since."""
        tensor = self.tensor
        if tensor is None:
            return materialize(self)
        if self.maker is None and tensor._version != self.version:
            raise RuntimeError(changed_in_place(tensor, self.version))
        return tensor

    def seen_in(self, needed: set[int], ordinal: int) -> None:
        """Remember a call that has saved it, and which of its tensors it was there."""
        if self.places is None:
            self.places = []
        self.places.append((needed, ordinal))

    def need(self) -> None:
        """Have the saved tensors that are this value seen in later runs, too."""
        for needed, ordinal in self.places or ():
            needed.add(ordinal)
        self.places = None

    def keep(self, tensor: Tensor) -> None:
        """Hold `tensor` (detached) from now on instead of making it again."""
        self.tensor, self.version, self.maker = tensor, tensor._version, None

    def arrive(self, tensor: Tensor) -> None:
        """It has been made again: stay if somebody waits."""
        number = backward_number()
        if self.seen != number:
            self.seen, self.reads = number, 0
        if self.tensor is None and self.readers > self.reads:
            self.tensor = tensor


def value_without_grad_fn(tensor: Tensor) -> Value:
    """A value that keeps a tensor that no node made."""
    value = Value(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        value.leaf = id(tensor)
    return value


class Handle:
    """One reader's claim on a value, seen through the reader's view of it."""

    __slots__ = ("__weakref__", "seen", "value", "view")

    def __init__(self, value: Value, view: Geometry | Tensor | None = None) -> None:
        self.value = value
        self.view = view
        """Where it is in the value; for a kept one also the view itself, which is quicker to hold than to take."""
        self.seen = _NEVER
        """The backward pass that read it last."""
        value.readers += 1

    def get(self) -> Tensor:
        """The tensor with the geometry it was saved with. May be called any number of times."""
        value, view = self.value, self.view
        tensor = value.tensor
        if value.maker is not None:
            if tensor is None:
                tensor = materialize(value)
            self._read(value)
        else:
            assert tensor is not None
            if tensor._version != value.version:
                raise RuntimeError(changed_in_place(tensor, value.version))
        if view is None:
            return tensor
        return tensor.as_strided(*view) if isinstance(view, tuple) else view

    def become(self, value: Value) -> None:
        """Claim another value. Not for a handle that has been read."""
        self.value.readers -= 1
        self.value = value
        value.readers += 1

    def _read(self, value: Value) -> None:
        """Count this reader; if nobody waits any longer, let go of what can be made again."""
        number = backward_number()
        if value.seen != number:
            value.seen, value.reads = number, 0
        if self.seen != number:
            self.seen = number
            value.reads += 1
        if value.reads == value.readers:
            value.tensor = None

    def wait(self) -> None:
        """Be unread, also if what this is an operand of has been made before in the same pass."""
        if self.seen != _NEVER:
            if self.seen == self.value.seen:
                self.value.reads -= 1
            self.seen = _NEVER

    def __del__(self) -> None:
        value = self.value
        value.readers -= 1
        if self.seen != _NEVER and self.seen == value.seen:
            value.reads -= 1
        elif value.reads == value.readers and value.maker is not None:
            value.tensor = None


def materialize(value: Value) -> Tensor:
    """Make `value` again, and before it whatever it needs that is not there.

    Not by recursion: a chain of recomputes may be as long as a model is deep.
    """
    pending = [value]
    while True:
        top = pending[-1]
        if top.tensor is not None and top is not value:
            pending.pop()
            continue
        maker, missing = top.maker, []
        assert maker is not None
        for operand in maker.operands:
            if operand is not None:
                if operand.seen != _NEVER:
                    operand.wait()  # so that what is made for it stays until it is read
                if operand.value.tensor is None:
                    missing.append(operand.value)
        if missing:
            pending += missing
        elif top is value:
            return maker.make(top)
        else:
            maker.make(top)


def changed_in_place(tensor: Tensor, version: int) -> str:
    """PyTorch's own words for a saved tensor that was modified: tools and people know them."""
    kind = f"{tensor.type()} {list(tensor.shape)}"
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind}] is at version {tensor._version}; expected version {version} instead."
    )


_KEYS = tuple(("lowtide", output) for output in range(8))
"""Of node metadata, for the first outputs of a node."""


def register(node: Node, output: int, value: Value) -> None:
    """Let later readers of the node's output find `value` while somebody holds it. The node holds no value alive."""
    node_metadata(node)[_KEYS[output] if output < len(_KEYS) else ("lowtide", output)] = weakref.ref(value)


def registered(node: Node, output: int) -> Value | None:
    """The value of a node's output, if it was registered and somebody still holds it."""
    found = node_metadata(node).get(_KEYS[output] if output < len(_KEYS) else ("lowtide", output))
    return None if found is None else found()


@never_compiled
def unpack(handle: Handle | ReachableObjects) -> Tensor:
    """The unpack hook."""
    global probe
    if isinstance(handle, tuple):
        tensor, version = handle
        if tensor._version != version:
            raise RuntimeError(changed_in_place(tensor, version))
        return tensor
    told = probe
    if told is None:
        return handle.get()
    if not told.has_packed(handle):
        probe = None  # nor is it told what is made for that
        try:
            return handle.get()
        finally:
            probe = told
    told.reading(handle)
    tensor = handle.get()
    told.given(handle, tensor)
    return tensor


def peek(node: Node, attribute: str) -> Any:
    """What a node saved under `attribute`, without making it again and without running anybody's hooks.

    A tensor: the handle that our pack hook returned, or the tensor itself where no hook saw it; None if it is not there
    (yet, or no longer) or in the hands of somebody else's hooks. Several tensors: a tuple of these. Else the constant.
    Raises AttributeError if the node has no such attribute.
    """
    slot = saved_slot(node, attribute)
    if slot is None:
        return getattr(node, attribute)
    if isinstance(slot, tuple | list):
        return tuple(_within(item) for item in slot)
    return _within(slot)


def _within(slot: Any) -> Handle | Tensor | None:
    data = slot.data
    if slot.unpack_hook is unpack and type(data) is tuple:
        return data[0]  # type: ignore[no-any-return]
    ours = isinstance(data, Handle) or slot.unpack_hook is None
    return data if ours else None


class Observer:
    """Is told what happens under the plan of one engine. Never there in a training loop but for its first steps."""

    engine: Engine

    def has_packed(self, handle: Handle) -> bool:
        """Whether this is one of those that it was told of; it is told when they are read, and of no others."""
        return True

    def entering(self, seam: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is about to run; `seam.engine.scope` is its call."""

    def returning(self, seam: CallInterceptor, result: Any) -> None:
        """The call is about to be over, with a result."""

    def leaving(self, seam: CallInterceptor) -> None:
        """The call is over, with a result or an exception."""

    def packed(self, handle: Handle, tensor: Tensor) -> None:
        """`tensor` was saved for backward, as `handle`."""

    def noted(self, place: CaptureSite, operand: Tensor) -> None:
        """An operator was given a tensor that autograd does not record."""

    def sized_by_contents(self, operator: str) -> None:
        """An operator gave what is as large as the contents of a tensor make it."""

    def reading(self, handle: Handle) -> None:
        """Backward is about to read a saved tensor."""

    def given(self, handle: Handle, tensor: Tensor) -> None:
        """This is what it reads."""

    def making(self, maker: Recomputation) -> None:
        """A recipe or a replay is about to run; its operands are there."""

    def made(self, maker: Recomputation, outputs: tuple[Tensor, ...]) -> None:
        """It ran, and gave this."""

    def writing_over(self, node: str, n_bytes: int) -> None:
        """A gradient is about to be written over the one of so many bytes that came to a node of that kind."""


probe: Observer | None = None


def observer_of(engine: Engine) -> Observer | None:
    """Who is to be told what happens under the plan of `engine`."""
    return probe if probe is not None and probe.engine is engine else None
