"""Fields of values and handles, and their way through unpack, in Python: the reference for hot_path.cpp.

`saved_values.py` builds its classes on these, or on the compiled ones that do the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide._torch.backward import backward_number

if TYPE_CHECKING:
    import weakref

    import torch
    from torch import Tensor

Geometry = tuple["torch.Size", tuple[int, ...], int]
"""Size, stride and storage offset of a view, in elements."""

NEVER = -2
"""Number that means no pass: backward numbers its passes from 0, and outside any pass the number is -1."""


class ValueFields:
    """Base class of `Value`, with its fields, if the compiled hooks are not loaded."""

    __slots__ = (
        "is_intermediate",
        "is_partial",
        "last_backward",
        "leaf",
        "maker",
        "original",
        "output",
        "places",
        "readers",
        "reads",
        "tensor",
        "version",
    )  # fmt: skip

    def __init__(self, tensor: Tensor | None = None, *, maker: Any = None, output: int = 0) -> None:
        self.tensor = tensor
        self.version = -1 if tensor is None else tensor._version
        """The tensor's version when it was saved; -1 without a tensor."""
        self.maker = maker
        self.output = output
        self.is_intermediate = False
        """True if only recomputes, never autograd, have read this value."""
        self.is_partial = False
        """True if the value holds only the part of a saved tensor that backward reads, so that no recompute can use it.
        """
        self.leaf = 0
        """`id` of the parameter that the value is; 0 for any other value."""
        self.original: weakref.ref[Tensor] | None = None
        """Weak reference to the original tensor, if a recompute reads it although autograd has not saved it."""
        self.places: list[tuple[set[int], int]] | None = None
        """Sets of needed ordinals that are being learnt, each with the ordinal of this value in that call
        (`Value.need`).
        """
        self.readers = 0
        """Number of handles."""
        self.reads = 0
        """Number of handles that were read in the backward pass `last_backward`."""
        self.last_backward = NEVER


class HandleFields:
    """Base class of `Handle` if the compiled hooks are not loaded: its fields, and the method `get`, which the unpack
    hook calls.
    """

    __slots__ = ("last_backward", "value", "view")

    def __init__(self, value: Any, view: Geometry | Tensor | None = None) -> None:
        self.value = value
        self.view = view
        """Geometry of the view within the value; for a kept value the view itself, which saves the time to make it."""
        self.last_backward = NEVER
        """Number of the backward pass that read the handle last."""
        value.readers += 1

    def get(self) -> Tensor:
        """Return the saved tensor, recomputed if necessary, with its original geometry. Repeated calls are allowed.

        After the last handle has read a recomputed tensor, the value no longer holds it.
        """
        value, view = self.value, self.view
        tensor: Tensor | None = value.tensor
        if value.maker is not None:
            if tensor is None:
                tensor = materialize(value)
            number = backward_number()
            if value.last_backward != number:
                value.last_backward, value.reads = number, 0
            if self.last_backward != number:
                self.last_backward = number
                value.reads += 1
            if value.reads == value.readers:  # this was the last reader
                value.tensor = None
        else:
            assert tensor is not None
            if tensor._version != value.version:
                raise RuntimeError(changed_in_place(tensor, value.version))
        if view is None:
            return tensor
        return tensor.as_strided(*view) if isinstance(view, tuple) else view

    def __del__(self) -> None:
        value = self.value
        value.readers -= 1
        if self.last_backward != NEVER and self.last_backward == value.last_backward:
            value.reads -= 1
        elif value.reads == value.readers and value.maker is not None:
            value.tensor = None


def materialize(value: Any) -> Tensor:
    """Recompute `value`, after recomputing its operands, and in turn their operands, that are not in memory.

    The function does not recurse: a chain of recomputes may be as long as a model is deep.
    """
    pending = [value]
    while True:
        top = pending[-1]
        if top.tensor is not None and top is not value:
            pending.pop()
            continue
        maker, missing = top.maker, []
        assert maker is not None
        gather = getattr(maker, "gather", None)  # of a recompute that may be the end of a chain
        for operand in maker.operands if gather is None else gather(top):
            if operand is not None:
                if operand.last_backward != NEVER:
                    operand.mark_unread()  # unread, so that the recomputed value stays until it is read
                if operand.value.tensor is None:
                    missing.append(operand.value)
        if missing:
            pending += missing
        elif top is value:
            tensor: Tensor = maker.make(top)
            return tensor
        else:
            maker.make(top)


def changed_in_place(tensor: Tensor, version: int) -> str:
    """Return the message for a saved tensor that was modified in place, in PyTorch's own words, which users and tools
    recognize.
    """
    kind = f"{tensor.type()} {list(tensor.shape)}"
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind}] is at version {tensor._version}; expected version {version} instead."
    )
