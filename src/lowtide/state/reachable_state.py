"""State outside the model that a step changes: modules, schedulers, scalers, generators, tensors of its code.

A rehearsed step is a real one. It may advance a learning-rate scheduler, average weights into a second model, or update
batch norm statistics of a teacher. None of these is an argument of the step, so the search follows the step's code:
closures, globals and methods that it names, attributes, containers. Only objects with contents of their own to put back
are collected; `reachable_objects.py` puts numbers, strings and containers back.
"""

from __future__ import annotations

import array
import contextlib
import contextvars
import ctypes
import functools
import gc
import itertools
import mmap
import random
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from lowtide._torch.optim import read_scaler_stages, set_scaler_stages
from lowtide._torch.tensors import is_leaf_tensor
from lowtide.memory.entry_storages import exclude_from_entry
from lowtide.state.bindings import has_graph, kind_of
from lowtide.state.introspection import NamedAttributes, is_opaque, is_user_code, variables
from lowtide.utils.object_slots import read_slots

LARGEST = 1000
"""Largest number of entries of a list, tuple or set that is searched. Larger ones are data, not state, as are data sets
and loaders; in larger dicts only tensors and modules are searched for.
"""

LARGEST_BYTES = 1 << 28
"""Largest size in bytes of a tensor that counts as state, unless a module owns it."""

_GENERATORS = (
    torch.Generator,
    np.random.Generator,
    np.random.BitGenerator,
    np.random.RandomState,
    random.Random,
)

LEAVES = (str, bytes, int, float, complex, bool, type(None), types.ModuleType, types.BuiltinFunctionType)
BUFFERS = (bytearray, array.array, mmap.mmap, ctypes._SimpleCData, ctypes.Array, ctypes.Structure)
"""Objects whose bytes can be written."""
DATA = {"datasets", "multiprocessing", "queue"}
"""Packages of data and of data transport, whose objects are not searched."""


class ReachableState:
    """Every module, tensor and object with a `state_dict` that is reachable from `roots`. The search runs no code of
    these objects.
    """

    largest = LARGEST

    def __init__(self, *roots: Any) -> None:
        self.modules: list[nn.Module] = []
        self.tensors: list[Tensor] = []
        self.stateful: list[Any] = []
        """Schedulers, gradient scalers, and other objects with `state_dict` and `load_state_dict`."""
        self.generators: list[Any] = []
        """Random number generators of torch, NumPy and Python."""
        self._named = NamedAttributes("forward")  # `model(x)` calls it
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
        self.visit(*roots)

    def visit(self, *roots: Any) -> None:
        """Walk from `roots`, skipping objects that were visited before."""
        pending = deque(roots)
        while pending:
            obj = pending.popleft()
            if isinstance(obj, types.BuiltinFunctionType):
                obj = obj.__self__  # a method such as `random.Random(0).random`
            if not is_leaf(obj) and id(obj) not in self._seen and self._is_of_interest(obj):
                self._seen[id(obj)] = obj
                pending.extend(self._visit(obj))

    def _is_of_interest(self, obj: Any) -> bool:
        """Return True if `obj` should be visited."""
        return True

    @property
    def visited(self) -> Collection[Any]:
        """Return all visited objects."""
        return self._seen.values()

    def _visit(self, obj: Any) -> Iterable[Any]:
        """Collect `obj` if it is state; return the objects that it refers to."""
        if isinstance(obj, Tensor):
            return self._tensor(obj)
        if kind_of(obj) is not None:
            return self._container(obj)
        if isinstance(obj, tuple | frozenset):
            inside = obj if len(obj) <= self.largest else ()
            return (*inside, *self._object(obj)) if hasattr(obj, "__dict__") else inside
        if isinstance(obj, types.FunctionType):
            return self._function(obj)
        if isinstance(obj, type):
            return self._class(obj)
        if isinstance(obj, types.MethodType):
            return (obj.__self__, obj.__func__)
        if isinstance(obj, functools.partial):
            return (obj.func, obj.args, obj.keywords, vars(obj))
        if isinstance(obj, contextvars.ContextVar):
            return self._context_variable(obj)
        if isinstance(obj, memoryview | _VIEWS):
            return _find_viewed_contents(obj)
        return _referent(obj) if isinstance(obj, weakref.ref) else self._object(obj)

    def _tensor(self, tensor: Tensor) -> Iterable[Any]:
        if is_state(tensor) and tensor.nbytes <= LARGEST_BYTES:
            self.tensors.append(tensor)
        return ()

    def _container(self, container: Any) -> Iterable[Any]:
        kind = kind_of(container)
        if not issubclass(kind, dict):
            return [*kind.__iter__(container)] if kind.__len__(container) <= self.largest else ()
        inside = [*dict.values(container)]
        return inside if len(inside) <= self.largest else [x for x in inside if isinstance(x, Tensor | nn.Module)]

    def _function(self, function: types.FunctionType) -> Iterable[Any]:
        own = (vars(function),) if is_user_code(function) else ()
        return (*find_referenced_objects(function), *own, *self._named.add_code(function))

    def _class(self, kind: type) -> Iterable[Any]:
        return self._named.add_object(kind)

    def _context_variable(self, variable: contextvars.ContextVar[Any]) -> Iterable[Any]:
        return (variable.get(None),)

    def _object(self, obj: Any) -> Iterable[Any]:
        if isinstance(obj, np.ndarray) and obj.dtype == object:
            return list_objects(obj, self.largest)
        if isinstance(obj, Optimizer | Dataset | DataLoader | Sampler):  # an optimizer is recorded when it steps
            return ()
        if is_generator(obj):
            self.generators.append(obj)
            return ()
        attributes = getattr(obj, "__dict__", None)
        defined_in = type(obj).__module__
        if is_opaque(type(obj)) or defined_in.partition(".")[0] in DATA:
            return ()
        if type(attributes) is not dict:
            return (*read_slots(obj), *self._named.add_object(obj)) if is_user_code(type(obj)) else ()
        if defined_in.startswith("torch.distributed.") and not isinstance(obj, nn.Module):
            return ()  # such as FSDP's tensors, whose memory is freed between uses
        self._classify(obj)
        return (attributes, *read_slots(obj), vars(type(obj)).get("__call__"), *self._named.add_object(obj))

    def _classify(self, obj: Any) -> None:
        if isinstance(obj, nn.Module):
            self.modules.append(obj)
        elif _has_state(type(obj)):
            self.stateful.append(obj)


_VIEWS = types.MappingProxyType | type({}.values()) | type({}.items())


def _find_viewed_contents(view: Any) -> Iterable[Any]:
    """Return the object behind a memoryview, or the values of the dict behind a dict's view, if any."""
    if not isinstance(view, memoryview):
        return (value for table in gc.get_referents(view) if kind_of(table) is dict for value in dict.values(table))
    with contextlib.suppress(ValueError):  # it has been released
        return (view.obj,)
    return ()


def is_leaf(obj: Any) -> bool:
    """Return True if `obj` is of a kind that refers to no other object, such as a number, and has no attributes of its
    own.

    Numbers and strings of user-defined classes may have attributes.
    """
    return isinstance(obj, LEAVES) and (isinstance(obj, types.ModuleType) or not hasattr(obj, "__dict__"))


def _referent(reference: weakref.ref[Any]) -> Iterable[Any]:
    """Return the object that `reference` leads to; nothing if it has an autograd graph, which the walk would keep in
    memory.
    """
    obj = weakref.ref.__call__(reference)
    return () if has_graph(obj) else (obj,)


def list_objects(values: np.ndarray[Any, Any], most: int) -> list[Any]:
    """Return the objects in an array of objects, or none if the array has more than `most` elements."""
    return np.asarray(values).ravel().tolist() if values.size <= most else []


def is_state(tensor: Tensor) -> bool:
    """Return True if a tensor outside modules may be state of a step: a strided leaf, not meta or inference."""
    return is_leaf_tensor(tensor) and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_inference())


def _has_state(kind: type) -> bool:
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def is_torch_function(function: types.FunctionType) -> bool:
    """Return True if the function is torch's own, which has no state."""
    return (function.__module__ or "").partition(".")[0] == "torch"


def find_referenced_objects(function: types.FunctionType) -> Iterator[Any]:
    """Yield the objects that a function's code can reach by name: globals, closure and defaults.

    Torch's own functions yield none, because they have no state.
    """
    if is_torch_function(function):
        return
    for _, _, content in variables(function):
        yield content
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield getattr(function, "__wrapped__", None)


class State:
    """A copy of the `state_dict` of a scheduler or gradient scaler, which is restored only if it has changed."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._before = _copy(owner.state_dict())
        self._stages = read_scaler_stages(owner) if isinstance(owner, GradScaler) else None

    @property
    def scales(self) -> bool:
        """Return True if the owner is an enabled gradient scaler."""
        return self._stages is not None and bool(self._before)

    def restore(self) -> None:
        now = self._owner.state_dict()
        if not _equal(self._before, now):
            self._owner.load_state_dict(_copy_on_devices_of(self._before, now))
        if self._stages is not None:  # a step that failed halfway may leave the stages changed
            set_scaler_stages(self._owner, self._stages)

    def set_scale_to_one(self) -> None:
        """Make a gradient scaler scale by 1.

        With the high initial scale, gradients often overflow. The scaler would then skip the optimizer's step, and the
        memory of that step would not be measured.
        """
        if self.scales:
            self._owner.load_state_dict({**_copy_on_devices_of(self._before, {}), "scale": 1.0})


def is_generator(obj: Any) -> bool:
    """Return True if `obj` is a random number generator whose state can be saved; `random.SystemRandom` has none."""
    return isinstance(obj, _GENERATORS) and not isinstance(obj, random.SystemRandom)


def states(owners: Iterable[Any]) -> list[State]:
    """Return a snapshot of the `state_dict` of each owner; owners whose `state_dict()` raises are left out."""
    reported = []
    for owner in owners:
        try:
            reported.append(State(owner))
        except Exception:  # code of other packages, which may depend on objects that do not exist yet
            continue
    return reported


def _copy(state: Any) -> Any:
    if isinstance(state, Tensor):
        return exclude_from_entry(state.detach().to("cpu", copy=True))
    if isinstance(state, dict):
        return {key: _copy(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_copy, state))
    return state


def _copy_on_devices_of(saved: Any, now: Any) -> Any:
    """Return a copy of `saved`, with its tensors on the devices of their counterparts in `now`."""
    if isinstance(saved, Tensor):
        return saved.to(now.device if isinstance(now, Tensor) else "cpu", copy=True)
    if isinstance(saved, dict):
        return {
            key: _copy_on_devices_of(value, now.get(key) if isinstance(now, dict) else None)
            for key, value in saved.items()
        }
    if type(saved) in (list, tuple):
        items = now if isinstance(now, list | tuple) else ()
        return type(saved)(
            _copy_on_devices_of(value, of) for value, of in itertools.zip_longest(saved, items[: len(saved)])
        )
    return saved


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other.cpu())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if one is other:
        return True
    try:
        return bool(one == other)
    except Exception:  # a comparison without a truth value, as of arrays, counts as a change
        return False
