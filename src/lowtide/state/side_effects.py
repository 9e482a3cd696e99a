"""Changes made by a call that a replay would repeat: state that is neither a module's nor an RNG's.

A replay restores the state that `call_context.py` covers. It does not restore a running mean in a user's object, a
global counter, an array, or a tensor that is no buffer: a call that changes one of these is not run again, not even on
trial. So such state is inspected when a call begins and when it is over.

Items consumed from an iterator, and writes to a large array, can't be seen by inspection: a call whose code can reach
one of these is not run again either.
"""

from __future__ import annotations

import contextvars
import queue
import types
import zlib
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from lowtide._torch.compiled_code import STATIC_INPUT
from lowtide._torch.fake_modes import bytes_of, uncompiled
from lowtide._torch.tensors import is_leaf_tensor, is_plain
from lowtide.runtime.exposed_memory import Contents
from lowtide.state.bindings import Cell, Variables
from lowtide.state.introspection import is_user_code, variables
from lowtide.state.reachable_state import BUFFERS, ReachableState, is_torch_function, list_objects
from lowtide.utils.object_slots import read_slots

if TYPE_CHECKING:
    from lowtide.runtime.call_context import CallContext

CHANGES = "it changes something outside its modules, which a replay would change once more"
WRITES = "it writes to its parameters, which a replay would write to once more"
ITERATES = "its code has an iterator, and what that has given can't be given back"
UNSEEN = "its code can write to an array of more than 64 MiB, which is too large to be compared"

LARGEST_BYTES = 2**26
"""Largest size in bytes of arrays in which writes are detected."""
LARGEST_TENSOR_BYTES = 2**22
"""Largest size in bytes of tensors in which writes without a new version are detected."""


class CodeState(ReachableState):
    """Snapshot of the state that the code of `module` can reach, except for state that `context` restores."""

    def __init__(self, module: nn.Module, context: CallContext) -> None:
        parts = tuple(module.modules())
        self._restored = {id(vars(part).get(name)) for part in parts for name in _MODULE_ATTRIBUTES}
        self._restored |= context.attributes.restored_ids
        self._restored |= {id(t) for part in parts for t in (*part._parameters.values(), *part._buffers.values())}
        hooks = [hook for part in parts for table in _HOOKS for hook in getattr(part, table).values()]
        self._bound: list[Cell | Variables] = []
        """Variables that functions refer to."""
        kinds = [type(part) for part in parts if is_user_code(type(part))]
        tensors = [t for part in parts for t in (*part._parameters.values(), *part._buffers.values())]
        attributes = [vars(tensor) for tensor in tensors if tensor is not None and is_plain(tensor)]
        super().__init__(*(part.forward for part in parts), *parts, *hooks, *kinds, *attributes)
        self.iterates = any(hasattr(type(obj), "__next__") for obj in self.visited)
        self.has_unseen_writes = any(map(_hides_writes, self.visited))
        tables = {id(vars(part)) for part in parts}
        self._watched = [obj for obj in self.visited if id(obj) not in tables]
        self._before = list(map(_comparable, self._watched))
        gathered = () if context.mutable_state.units else parts  # units free their parameters between uses
        self._parameters = [(p, Contents(p)) for part in gathered for p in part._parameters.values() if p is not None]

    def _is_of_interest(self, obj: Any) -> bool:
        return id(obj) not in self._restored and type(obj).__module__.partition(".")[0] != "lowtide"

    def _visit(self, obj: Any) -> Iterable[Any]:
        if (written := uncompiled(obj)) is not obj:
            return (written,)  # private state of its compiler may change at any time
        is_private = type(obj).__module__.startswith("torch._") and not isinstance(obj, Tensor)
        return () if is_private else super()._visit(obj)

    def _function(self, function: types.FunctionType) -> Iterable[Any]:
        for place, name, _ in variables(function) if not is_torch_function(function) else ():
            self._bound.append(Cell(place, name) if isinstance(place, types.CellType) else Variables(place, [name]))
        return super()._function(function)

    def has_changed(self) -> bool:
        """Return True if any of the state outside the modules has changed."""
        if any(places.current()[0] is not places.held[0] for places in self._bound):
            return True
        return any(_comparable(obj) != before for obj, before in zip(self._watched, self._before, strict=True))

    def why_not_again(self) -> str | None:
        """Return the reason why the call, which is now over, can't be run again; None if it can."""
        if self.iterates:
            return ITERATES
        if self.has_unseen_writes:
            return UNSEEN
        if any(not contents.are_in(parameter) for parameter, contents in self._parameters):
            return WRITES
        return CHANGES if self.has_changed() else None


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has. Hooks in them come and go, such as transformers' hooks that collect outputs."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def _comparable(obj: Any) -> Any:
    """Return a value for `obj` that compares equal to a later one if `obj` has not changed.

    The value keeps the objects compared by identity alive, because their ids would otherwise be reused.
    """
    if isinstance(obj, Tensor):
        return None if obj.is_inference() else obj._version, _digest_output(obj)
    if isinstance(obj, np.ndarray):
        return _ByIdentity(tuple(list_objects(obj, CodeState.largest))) if obj.dtype == object else _checksum(obj)
    if isinstance(obj, BUFFERS):
        with memoryview(obj) as view:
            return zlib.crc32(view) if view.nbytes <= LARGEST_BYTES else None
    if isinstance(obj, contextvars.ContextVar):
        return _ByIdentity((obj.get(None),))
    if isinstance(obj, queue.Queue | queue.SimpleQueue):
        return obj.qsize()
    if isinstance(obj, dict):
        return _ByIdentity(
            tuple(content for name, content in dict.items(obj) if not (type(name) is str and name == STATIC_INPUT))
        )
    if isinstance(obj, list | tuple | deque | set | frozenset):
        return _ByIdentity(tuple(obj))
    if isinstance(obj, type):
        return _ByIdentity(tuple(vars(obj).values()))
    return _ByIdentity(tuple(read_slots(obj)))


def _hides_writes(obj: Any) -> bool:
    """Return True if `obj` is a writable array that is too large to be compared."""
    if isinstance(obj, np.ndarray):
        return obj.flags.writeable and obj.nbytes > LARGEST_BYTES and not obj.dtype.hasobject
    if isinstance(obj, BUFFERS):
        with memoryview(obj) as view:
            return view.nbytes > LARGEST_BYTES and not view.readonly
    return False


class _ByIdentity:
    """A list of objects, equal to another such list if both contain the same objects, compared by identity."""

    __slots__ = ("objects",)

    def __init__(self, objects: tuple[Any, ...]) -> None:
        self.objects = objects

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _ByIdentity)
            and len(self.objects) == len(other.objects)
            and all(one is another for one, another in zip(self.objects, other.objects, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]


def _digest_output(tensor: Tensor) -> int | None:
    """Return a digest of a small CPU tensor without a graph; None for any other tensor.

    A digest shows writes to the tensor's `.data`, which change no version.
    """
    if not is_leaf_tensor(tensor) or tensor.device.type != "cpu" or not is_plain(tensor):
        return None
    return None if tensor.untyped_storage().nbytes() > LARGEST_TENSOR_BYTES else _checksum(bytes_of(tensor))


def _checksum(array: np.ndarray[Any, Any]) -> int | None:
    if array.nbytes > LARGEST_BYTES or array.dtype.hasobject:
        return None
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)
