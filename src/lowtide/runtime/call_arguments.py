"""What a module call was given, taken apart so that it can be given again.

Tensors are held through handles wherever they are: in lists, tuples, dicts, dataclasses, other objects, and whatever is
registered with torch's pytrees. What holds them is made anew for each replay, so a call that appends to a list does not
append twice, and what is written into it after the call is not seen. A tensor given twice is one tensor again. Objects
without tensors are made anew, too, unless they are as they were; what can't be made from its attributes passes through.

A cache of keys and values is special. A call fills its own layer of it and may see all others, which nothing else would
keep in memory: of those only the shape is remembered, and a replay that wants more fails, which the audit finds out.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from functools import partial
from operator import getitem
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch.pytree import SUPPORTED_NODES
from lowtide.runtime.view_geometry import producer

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.runtime.saved_values import Handle, Value

Part = Callable[["_Given"], Any]
"""Makes a part of the arguments anew."""


class Arguments:
    """The arguments of one call."""

    __slots__ = ("_build", "_cached", "_given", "_grads", "devices", "generators", "handles")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], hold: Callable[[Tensor], Handle]) -> None:
        taken = _Apart()
        self._build = taken.part((args, kwargs))
        self.handles = tuple(hold(tensor) for tensor in taken.tensors)
        self._given = {
            id(producer(tensor)[0]): handle.value for tensor, handle in zip(taken.tensors, self.handles, strict=True)
        }
        self._grads = tuple(tensor.requires_grad for tensor in taken.tensors)
        self._cached: list[_Cached] = taken.cached
        self.devices = {tensor.device for tensor in taken.tensors}
        self.generators = tuple(taken.generators)

    def given(self, base: Tensor) -> Value | None:
        """The value of a tensor (of its base, for a view) that was given to the call in progress; None for others."""
        value = self._given.get(id(base))
        return value if value is not None and value.version == base._version else None

    def close(self) -> None:
        """The call is over: let go of what it left alone in caches."""
        self._given.clear()  # tensors that are alive no longer may have the same ids as others
        for cached in self._cached:
            cached.close()

    def again(self, handles: tuple[Handle, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the call began with, through `handles`: those in here, or others on the same values in the same order.

        Raises RuntimeError if a tensor of it was changed in place.
        """
        pairs = zip(handles, self._grads, strict=True)
        tensors = [handle.get().detach().requires_grad_(grad) for handle, grad in pairs]
        args, kwargs = self._build(_Given(tensors))
        return args, kwargs


def tensors_in_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that `Arguments` holds, each once, in its order."""
    taken = _Apart()
    taken.part((args, kwargs))
    return taken.tensors


class _Given:
    """What the parts are made of: the tensors, and what was made so far."""

    __slots__ = ("made", "tensors")

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.made: dict[int, Any] = {}

    def filled(self, key: int, new: Any, fill: Callable[[Any], object]) -> Any:
        """`new`, known under `key` before `fill` makes its contents: they may lead back to it."""
        self.made[key] = new
        fill(new)
        return new


class _Cached:
    """A tensor in a cache, and how to find out whether it is still there."""

    __slots__ = ("now", "tensor")

    def __init__(self, tensor: Tensor, now: Callable[[], Any]) -> None:
        self.tensor, self.now = tensor, now

    def close(self) -> None:
        untouched = self.now() is self.tensor
        self.tensor = torch.empty_like(self.tensor, device="meta") if untouched else self.tensor.detach()
        del self.now


class _Apart:
    """Takes things apart."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.cached: list[_Cached] = []
        self.generators: list[torch.Generator] = []
        self._places: dict[int, int] = {}
        self._seen: dict[int, Any] = {}
        self._encounters = 0
        self._depth = 0
        self._in_cache = False

    def part(self, thing: Any, now: Callable[[], Any] | None = None) -> Part:
        """How to make `thing` anew. Where it is in a cache, `now()` is what is in its place there."""
        kind, key = type(thing), id(thing)
        if kind in ATOMS:
            return _AsItIs(thing)
        if isinstance(thing, torch.Tensor):
            return self._tensor(thing, now)
        if key in self._seen:
            return lambda given: given.made[key]
        if kind is tuple:
            parts = [self.part(item) for item in thing]
            return lambda given: tuple([part(given) for part in parts])
        if isinstance(thing, tuple):
            parts = [self.part(item) for item in thing]
            return lambda given: _tuple(kind, [part(given) for part in parts])
        if kind is list:
            self._seen[key] = thing
            parts = [self.part(item, partial(getitem, thing, n)) for n, item in enumerate(thing)]
            return lambda given: given.filled(key, [], lambda new: new.extend([part(given) for part in parts]))
        if kind is dict:
            self._seen[key] = thing
            named = {name: self.part(item, partial(getitem, thing, name)) for name, item in thing.items()}
            return lambda given: given.filled(key, {}, lambda new: new.update({n: p(given) for n, p in named.items()}))
        if kind in SUPPORTED_NODES:
            children, context = SUPPORTED_NODES[kind].flatten_fn(thing)
            parts = [self.part(item) for item in children]
            return lambda given: SUPPORTED_NODES[kind].unflatten_fn([part(given) for part in parts], context)
        if kind is set:
            self._seen[key] = thing
            parts = [self.part(item) for item in thing]
            return lambda given: given.filled(key, set(), lambda new: new.update([part(given) for part in parts]))
        if isinstance(thing, torch.Generator):
            self.generators.append(thing)
        elif self._depth < _DEPTH and not (callable(thing) or isinstance(thing, Enum)):
            return self._object(thing)
        return _AsItIs(thing)

    def _tensor(self, tensor: Tensor, now: Callable[[], Any] | None) -> Part:
        self._encounters += 1
        if self._in_cache and now is not None:
            if not tensor.dim():  # a setting of the cache, or how much of it is filled
                number = tensor.detach().clone()
                return lambda given: number.clone()
            cached = _Cached(tensor, now)
            self.cached.append(cached)
            return lambda given: cached.tensor
        place = self._places.setdefault(id(tensor), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(tensor)
        return lambda given: given.tensors[place]

    def _object(self, thing: Any) -> Part:
        """One that is made anew, from its attributes and, of a list or dict of a class of its own, its items."""
        key, kind, attributes = id(thing), type(thing), _attributes(thing)
        outside, before, cache = self._in_cache, self._encounters, self._in_cache or _is_cache(thing)
        seen = len(self._seen)
        self._seen[key] = thing
        self._depth, self._in_cache = self._depth + 1, cache
        named = {n: self.part(item, partial(getattr, thing, n)) for n, item in attributes.items()}
        base, items = _items(thing)
        parts = [(self.part(place), self.part(item)) for place, item in items]
        self._depth, self._in_cache = self._depth - 1, outside
        holds_tensors = self._encounters > before or cache
        if not holds_tensors and not _can_be_made(kind, base):
            for inside in list(self._seen)[seen:]:
                del self._seen[inside]
            return _AsItIs(thing)

        def build(given: _Given) -> Any:
            def fill(new: Any) -> None:
                for place, item in parts:
                    _add(base, new, place(given), item(given))
                for name, part in named.items():
                    object.__setattr__(new, name, part(given))

            return given.filled(key, base.__new__(kind), fill)

        is_simple = base in (object, SimpleNamespace) and all(isinstance(part, _AsItIs) for part in named.values())
        return _unless_changed(thing, attributes, build) if is_simple and not holds_tensors else build


class _AsItIs:
    """A part that passes through."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __call__(self, given: _Given) -> Any:
        return self.thing


def _unless_changed(thing: Any, attributes: dict[str, Any], build: Part) -> Part:
    """`thing` itself, which somebody may know it by, while it has these attributes; else what `build` makes.

    Not held: what is written into it later may lead back to who holds it here.
    """
    try:
        reference = weakref.ref(thing)
    except TypeError:
        return build

    def again(given: _Given) -> Any:
        there = reference()
        if there is not None:
            now = _attributes(there)
            if now.keys() == attributes.keys() and all(now[name] is attributes[name] for name in now):
                return given.filled(id(there), there, lambda there: None)
        return build(given)

    return again


def _attributes(thing: Any) -> dict[str, Any]:
    """What an object consists of, in `__dict__` and in the slots of its classes."""
    found = dict(vars(thing)) if hasattr(thing, "__dict__") else {}
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            full = f"_{kind.__name__.lstrip('_')}{name}" if private else name
            if full not in ("__dict__", "__weakref__") and hasattr(thing, full):
                found[full] = getattr(thing, full)
    return found


_HEAP_TYPE = 1 << 9
"""The flag of classes that Python code has made (`Py_TPFLAGS_HEAPTYPE`)."""


def _items(thing: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """The class in C that makes such objects, and the items of a list or dict, by place or name."""
    base = next(kind for kind in type(thing).__mro__ if not kind.__flags__ & _HEAP_TYPE)
    if base is list:
        return base, list(enumerate(list.__iter__(thing)))
    if base in (dict, OrderedDict):
        return base, [(name, base.__getitem__(thing, name)) for name in base.__iter__(thing)]
    return base, []


def _add(base: Any, new: Any, name: Any, item: Any) -> None:
    """One of the items that `_items` gave, in its turn."""
    if base is list:
        list.append(new, item)
    else:
        base.__setitem__(new, name, item)


def _can_be_made(kind: Any, base: Any) -> bool:
    """Whether an object of this class, one of Python's own code, is all that its attributes and items are."""
    if kind is object or base not in (object, list, dict, OrderedDict, SimpleNamespace):
        return False
    return kind.__new__ is base.__new__ and not hasattr(kind, "__del__")


def _is_cache(thing: Any) -> bool:
    """Whether `thing` is a cache of keys and values, as transformers writes them."""
    return hasattr(thing, "get_seq_length") and hasattr(thing, "update")


def _tuple(kind: type, items: list[Any]) -> Any:
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


_DEPTH = 4
"""Objects inside of objects are looked into this deep."""

ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice, range}
)
