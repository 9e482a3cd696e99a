"""Arguments of a module call, taken apart so that a replay can rebuild them.

Tensors are held through handles wherever they are: in lists, tuples, dicts, dataclasses, other objects, and containers
registered with torch's pytrees. Their containers are rebuilt for each replay, so a call that appends to a list does not
append twice, and later writes to a container are not seen. A tensor passed twice is one tensor again. Objects without
tensors are rebuilt too, unless they are unchanged; objects that can't be rebuilt from their attributes pass through.

Key-value caches are special. A call fills its own layer of a cache, and can reach the tensors of all other layers. Held
for a replay, those would stay in memory, so only their shape is kept; a replay that reads more of them fails, which the
audit detects.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from functools import partial
from operator import attrgetter, getitem
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch.pytree import SUPPORTED_NODES
from lowtide._torch.tensors import base_of
from lowtide.runtime.exposed_memory import EXPOSED
from lowtide.runtime.view_geometry import find_base_node_and_view

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.runtime.saved_values import Handle, Value

_REQUIRES_GRAD = attrgetter("requires_grad")
_IS_CPU = attrgetter("is_cpu")

Part = Callable[["_Inputs"], Any]
"""Function that rebuilds a part of the arguments."""


class Arguments:
    """Arguments of one module call, taken apart so that a replay can rebuild them; `handles` hold the tensors."""

    __slots__ = (
        "_build",
        "_cached",
        "_grads",
        "_n_args",
        "_names",
        "_places",
        "_things",
        "_values",
        "devices",
        "generators",
        "handles",
    )

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], hold: Callable[[Tensor], Handle]) -> None:
        things = [*args, *kwargs.values()]
        self._n_args, self._names = len(args), (*kwargs,)
        self._things: list[Any] = []
        """All arguments if they are tensors and plain data only, with None in the places of tensors."""
        self._places: list[tuple[int, int]] = []
        """Positions of tensors among `_things`, each with the tensor's number."""
        self._build: Part | None = None
        """Function that rebuilds the arguments if they contain more than tensors and plain data; else None."""
        self._cached: list[_Cached] = []
        self.generators: tuple[torch.Generator, ...] = ()
        if _FLAT.issuperset(map(type, things)):  # as in most calls
            tensors: list[Tensor] = []
            numbers: dict[int, int] = {}
            for place, thing in enumerate(things):
                if type(thing) is torch.Tensor:
                    number = numbers.setdefault(id(thing), len(tensors))
                    if number == len(tensors):
                        tensors.append(thing)
                    self._places.append((place, number))
                    things[place] = None
            self._things = things
        else:
            builder = _PartBuilder()
            self._build = builder.part((args, kwargs))
            tensors, self._cached, self.generators = builder.tensors, builder.cached, tuple(builder.generators)
        self.handles = (*map(hold, tensors),)
        self._values = {}
        for tensor, handle in zip(tensors, self.handles, strict=True):
            self._values[id(tensor if base_of(tensor) is None else find_base_node_and_view(tensor)[0])] = handle.value
        self._grads = [*map(_REQUIRES_GRAD, tensors)]
        self.devices = None if all(map(_IS_CPU, tensors)) else {tensor.device for tensor in tensors}
        """Devices of the tensors; None if that is the CPU alone."""

    def find_value(self, base: Tensor) -> Value | None:
        """Return the Value that holds `base` if `base`, or a view of it, is an argument of the call in progress.

        Returns None otherwise, and if `base` has been modified since the call began.
        """
        value = self._values.get(id(base))
        return value if value is not None and value.version == base._version else None

    def close(self) -> None:
        """Record the end of the call: keep only the shape of each tensor in a key-value cache that the call did not
        replace.
        """
        self._values.clear()  # new tensors may reuse the ids of freed ones
        for cached in self._cached:
            cached.close()

    def rebuild(self, handles: tuple[Handle, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Rebuild the call's arguments; return `args` and `kwargs`.

        Their tensors are read through `handles`: `self.handles`, or other handles on the same tensors in the same
        order. Raises RuntimeError if one of the tensors was changed in place.
        """
        tensors = []
        for handle, grad in zip(handles, self._grads, strict=True):
            tensor = handle.get() if handle.value.version != EXPOSED else handle.get_compared()
            tensors.append(tensor.detach().requires_grad_(grad))
        if self._build is not None:
            args, kwargs = self._build(_Inputs(tensors))
            return args, kwargs
        things, n_args = self._things.copy(), self._n_args
        for place, number in self._places:
            things[place] = tensors[number]
        return tuple(things[:n_args]), dict(zip(self._names, things[n_args:], strict=True))


def collect_call_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors in a call's arguments, also inside containers and objects, each once, in order."""
    things = (*args, *kwargs.values())
    if _FLAT.issuperset(map(type, things)):  # most calls get no containers
        return [*{id(thing): thing for thing in things if type(thing) is torch.Tensor}.values()]
    builder = _PartBuilder()
    builder.part((args, kwargs))
    return builder.tensors


class _Inputs:
    """Tensors from which the arguments of a call are rebuilt, and the objects that have been rebuilt so far."""

    __slots__ = ("rebuilt", "tensors")

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.rebuilt: dict[int, Any] = {}

    def filled(self, key: int, new: Any, fill: Callable[[Any], object]) -> Any:
        """Call `fill(new)`, which adds the contents of `new`, and return `new`.

        `new` is registered under `key` first, because its contents may refer back to it.
        """
        self.rebuilt[key] = new
        fill(new)
        return new


class _Cached:
    """Tensor in a key-value cache, and a function `now` that returns the present content of its place in the cache."""

    __slots__ = ("now", "tensor")

    def __init__(self, tensor: Tensor, now: Callable[[], Any]) -> None:
        self.tensor, self.now = tensor, now

    def close(self) -> None:
        untouched = self.now() is self.tensor
        self.tensor = torch.empty_like(self.tensor, device="meta") if untouched else self.tensor.detach()
        del self.now


class _PartBuilder:
    """Builder of functions that rebuild the parts of a call's arguments."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.cached: list[_Cached] = []
        self.generators: list[torch.Generator] = []
        self._places: dict[int, int] = {}
        self._visited: dict[int, Any] = {}
        self._encounters = 0
        self._depth = 0
        self._in_cache = False

    def part(self, thing: Any, now: Callable[[], Any] | None = None) -> Part:
        """Return a function that rebuilds `thing`, a part of the call's arguments.

        If `thing` is in a key-value cache, `now()` returns the present content of its place there.
        """
        kind, key = type(thing), id(thing)
        if kind in ATOMS:
            return _AsItIs(thing)
        if isinstance(thing, torch.Tensor):
            return self._build_tensor(thing, now)
        if key in self._visited:
            return lambda inputs: inputs.rebuilt[key]
        if kind is tuple:
            parts = [self.part(item) for item in thing]
            return lambda inputs: tuple([part(inputs) for part in parts])
        if isinstance(thing, tuple):
            parts = [self.part(item) for item in thing]
            return lambda inputs: _make_tuple(kind, [part(inputs) for part in parts])
        if kind is list:
            self._visited[key] = thing
            parts = [self.part(item, partial(getitem, thing, n)) for n, item in enumerate(thing)]
            return lambda inputs: inputs.filled(key, [], lambda new: new.extend([part(inputs) for part in parts]))
        if kind is dict:
            self._visited[key] = thing
            named = {name: self.part(item, partial(getitem, thing, name)) for name, item in thing.items()}
            return lambda inputs: inputs.filled(
                key, {}, lambda new: new.update({n: p(inputs) for n, p in named.items()})
            )
        if kind in SUPPORTED_NODES:
            children, context = SUPPORTED_NODES[kind].flatten_fn(thing)
            parts = [self.part(item) for item in children]
            return lambda inputs: SUPPORTED_NODES[kind].unflatten_fn([part(inputs) for part in parts], context)
        if kind is set:
            self._visited[key] = thing
            parts = [self.part(item) for item in thing]
            return lambda inputs: inputs.filled(key, set(), lambda new: new.update([part(inputs) for part in parts]))
        if isinstance(thing, torch.Generator):
            self.generators.append(thing)
        elif self._depth < _DEPTH and not (callable(thing) or isinstance(thing, Enum)):
            return self._build_object(thing)
        return _AsItIs(thing)

    def _build_tensor(self, tensor: Tensor, now: Callable[[], Any] | None) -> Part:
        self._encounters += 1
        if self._in_cache and now is not None:
            if not tensor.dim():  # a setting of the cache, or its length
                number = tensor.detach().clone()
                return lambda inputs: number.clone()
            cached = _Cached(tensor, now)
            self.cached.append(cached)
            return lambda inputs: cached.tensor
        place = self._places.setdefault(id(tensor), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(tensor)
        return lambda inputs: inputs.tensors[place]

    def _build_object(self, thing: Any) -> Part:
        """Return a function that rebuilds an object from its attributes, and from the items of a list or dict."""
        key, kind, attributes = id(thing), type(thing), _read_attributes(thing)
        outside, before, cache = self._in_cache, self._encounters, self._in_cache or _is_cache(thing)
        n_visited = len(self._visited)
        self._visited[key] = thing
        self._depth, self._in_cache = self._depth + 1, cache
        named = {n: self.part(item, partial(getattr, thing, n)) for n, item in attributes.items()}
        base, items = _read_items(thing)
        parts = [(self.part(place), self.part(item)) for place, item in items]
        self._depth, self._in_cache = self._depth - 1, outside
        holds_tensors = self._encounters > before or cache
        if not holds_tensors and not _can_be_rebuilt(kind, base):
            for inside in list(self._visited)[n_visited:]:
                del self._visited[inside]
            return _AsItIs(thing)

        def build(inputs: _Inputs) -> Any:
            def fill(new: Any) -> None:
                for place, item in parts:
                    _add_item(base, new, place(inputs), item(inputs))
                for name, part in named.items():
                    object.__setattr__(new, name, part(inputs))

            return inputs.filled(key, base.__new__(kind), fill)

        is_simple = base in (object, SimpleNamespace) and all(isinstance(part, _AsItIs) for part in named.values())
        return _make_part_unless_changed(thing, attributes, build) if is_simple and not holds_tensors else build


class _AsItIs:
    """Function that returns `thing`, a part of the arguments, unchanged."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __call__(self, inputs: _Inputs) -> Any:
        return self.thing


def _make_part_unless_changed(thing: Any, attributes: dict[str, Any], build: Part) -> Part:
    """Return a function that returns `thing` itself while its attributes are unchanged, else the result of `build`.

    Identity matters: other code may compare objects with `thing`. The function refers to `thing` weakly, because
    `thing` may refer back to the arguments later.
    """
    try:
        reference = weakref.ref(thing)
    except TypeError:
        return build

    def rebuild_if_changed(inputs: _Inputs) -> Any:
        there = reference()
        if there is not None:
            now = _read_attributes(there)
            if now.keys() == attributes.keys() and all(now[name] is attributes[name] for name in now):
                return inputs.filled(id(there), there, lambda there: None)
        return build(inputs)

    return rebuild_if_changed


def _read_attributes(thing: Any) -> dict[str, Any]:
    """Return the attributes of an object, from `__dict__` and from the slots of its classes."""
    attributes = dict(vars(thing)) if hasattr(thing, "__dict__") else {}
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            full = f"_{kind.__name__.lstrip('_')}{name}" if private else name
            if full not in ("__dict__", "__weakref__") and hasattr(thing, full):
                attributes[full] = getattr(thing, full)
    return attributes


_HEAP_TYPE = 1 << 9
"""Flag of classes created by Python code (`Py_TPFLAGS_HEAPTYPE`)."""


def _read_items(thing: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """Return the built-in base class of `thing`, such as `list`, and the items of a list or dict by index or key."""
    base = next(kind for kind in type(thing).__mro__ if not kind.__flags__ & _HEAP_TYPE)
    if base is list:
        return base, list(enumerate(list.__iter__(thing)))
    if base in (dict, OrderedDict):
        return base, [(name, base.__getitem__(thing, name)) for name in base.__iter__(thing)]
    return base, []


def _add_item(base: Any, new: Any, name: Any, item: Any) -> None:
    """Append `item` to the list `new`, or set `new[name]` if it is a dict, by the methods of the built-in class
    `base`.
    """
    if base is list:
        list.append(new, item)
    else:
        base.__setitem__(new, name, item)


def _can_be_rebuilt(kind: Any, base: Any) -> bool:
    """Return True if objects of the class `kind`, with the built-in base class `base`, can be rebuilt.

    They can if they have no state besides attributes and items.
    """
    if kind is object or base not in (object, list, dict, OrderedDict, SimpleNamespace):
        return False
    return kind.__new__ is base.__new__ and not hasattr(kind, "__del__")


def _is_cache(thing: Any) -> bool:
    """Return True if `thing` is a key-value cache in the style of transformers."""
    return hasattr(thing, "get_seq_length") and hasattr(thing, "update")


def _make_tuple(kind: type, items: list[Any]) -> Any:
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


_DEPTH = 4
"""Largest number of levels of nested objects that are searched."""

ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice, range}
)
_FLAT = ATOMS | {torch.Tensor}
