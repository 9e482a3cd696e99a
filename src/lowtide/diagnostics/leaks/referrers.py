"""Search for the holders of an object by `gc.get_referrers`, and describe them.

References are followed from a tensor outwards until they reach an object with a name: a variable, a module, a hook, an
exception.
"""

from __future__ import annotations

import builtins
import functools
import gc
import itertools
import re
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.distributions import Distribution

from lowtide.diagnostics.leaks.call_site import Place, find_calling_site, is_carried
from lowtide.diagnostics.leaks.holders import (
    Holder,
    make_class_holder,
    make_context_holder,
    make_context_variable_holder,
    stored_in,
)
from lowtide.diagnostics.leaks.linked_objects import LinkedObjects
from lowtide.diagnostics.leaks.reference_path import (
    CACHED,
    CONTAINERS,
    CYCLED,
    ENTRIES,
    TEED,
    ReferencePath,
    attribute_name,
    is_array_of_objects,
    is_container,
    map_labels,
    merged,
    n_entries,
    without_numbers,
)
from lowtide.diagnostics.leaks.running_frames import RunningFrames, Variable, find_name_in_frame
from lowtide.diagnostics.leaks.tensor_graphs import is_of_torch
from lowtide.state.introspection import find_defining_file, is_user_code, origin

if TYPE_CHECKING:
    from lowtide.diagnostics.leaks.registered_hooks import RegisteredHooks

LEVELS = 9
"""Largest number of references that are followed from a tensor to a named holder."""

MOST_TENSORS = 2_000
"""Largest number of objects whose referrers are searched for at once."""

_MANY = 256
"""Number of objects above which one pass over all live objects is faster than `gc.get_referrers`. Its time grows with
the product of both numbers.
"""

_GENERATORS = {
    GeneratorType: ("generator", "gi"),
    CoroutineType: ("coroutine", "cr"),
    AsyncGeneratorType: ("asynchronous generator", "ag"),
}
"""Types of suspended functions -> their kind in words, and the prefix of their attributes."""

_OUTPUT_NAME = re.compile(r"_+|_[oi]*\d+|_oh|Out|_i+|_ih|In")


def _is_output(name: str) -> bool:
    """Return True if a prompt or notebook assigns results to this name, such as `_` or `_12`.

    In a script, `_` is an ordinary variable.
    """
    return bool(_OUTPUT_NAME.fullmatch(name)) and (hasattr(sys, "ps1") or "IPython" in sys.modules)


@dataclass(slots=True)
class HolderSearch:
    """Search for holders among all live objects. It refers to user objects, so use it once and drop it."""

    modules: dict[int, str]
    """Ids of modules -> names such as `model.encoder`."""
    hooks: RegisteredHooks
    ignored: set[int] = field(default_factory=set)
    variables: RunningFrames = field(default_factory=RunningFrames)
    has_unnamed_lists: bool = False
    """True if a list without a name counts as a holder, such as that of a comprehension in progress."""
    linked: LinkedObjects = field(default_factory=LinkedObjects)
    unseen: list[Any] = field(default_factory=list)
    """Objects, such as NumPy arrays of objects, that the garbage collector does not name as referrers."""
    gathered: dict[CodeType, bool] = field(default_factory=dict)
    """Code of functions with closures -> True if a list, set or deque contains such functions."""

    def holders(self, tensors: Iterable[tuple[int, Any]]) -> dict[int, list[Holder]]:
        """Find the holders of objects, given as pairs of number and object. Return them by number, nearest first.

        Tensors that only C++ refers to have no holders. Referrers are searched for MOST_TENSORS objects at a time, so
        holders of further objects are found only in containers that they share with these.
        """
        holders_of: dict[int, list[Holder]] = {}
        ways = [ReferencePath(obj, {number}) for number, obj in tensors]
        unnamed: list[ReferencePath] = []
        tensors_through: dict[int, set[int]] = {}  # ids of objects -> tensors with paths through them
        for _ in range(LEVELS):
            if not ways:
                break
            by_id: dict[int, list[ReferencePath]] = {}
            for way in ways:
                by_id.setdefault(id(way.obj), []).append(way)
                tensors_through.setdefault(id(way.obj), set()).update(way.tensors)
                for variable in self.variables.find_by_object(way.obj):
                    whole = way.including_its_object()
                    _add_holder(holders_of, way, self._make_variable_holder(whole, variable, "local variable"))
            referrers = _find_referrers(tuple(same[0].obj for same in islice(by_id.values(), MOST_TENSORS)))
            referrers += [obj for obj in self.unseen if not by_id.keys().isdisjoint(map(id, _list_referents(obj)))]
            self.ignored.add(id(referrers))
            ways = []
            reached: set[int] = set()
            for referrer in referrers:
                if id(referrer) in self.ignored or self._is_ours(referrer):
                    continue
                met = dict.fromkeys(number for r in _list_referents(referrer) if (number := id(r)) in by_id)
                reached |= met.keys()
                known = tensors_through.setdefault(id(referrer), set())
                for way, inner in self._extend_outwards(referrer, [way for number in met for way in by_id[number]]):
                    if way.tensors <= known:
                        continue
                    named = self._find_named_holder(way, inner)
                    if named is not None:  # later paths may reach it again
                        _add_holder(holders_of, way, named)
                    else:
                        known |= way.tensors
                        ways.append(way)
            looked_for = islice(by_id.items(), MOST_TENSORS)
            unreferenced = (way for number, same in looked_for if number not in reached for way in same)
            unnamed += [way for way in unreferenced if way.path and (isinstance(way.obj, list) or CYCLED in way.path)]
        for way in unnamed if self.has_unnamed_lists else ():
            way.tensors -= holders_of.keys()
            _add_holder(holders_of, way, self._make_unnamed_holder(way))
        return holders_of

    def _make_unnamed_holder(self, way: ReferencePath) -> Holder:
        """Make the holder for a list or an `itertools.cycle` without a name, to which only an expression refers."""
        place = find_calling_site().place
        if CYCLED in way.path:
            return Holder(
                kind="variable",
                text=f"itertools.cycle of a loop that runs {place} {way.path[-1]}",
                key="itertools.cycle",
                name="itertools.cycle",
                containers=way.all_containers,
                gathers=True,
                is_cycle=True,
                place=place,
            )
        return Holder(
            kind="variable",
            text=f"{place} a list that is being made {way.text}",
            key=f"{place} list",
            name="the list",
            containers=way.all_containers,
            gathers=True,
            place=place,
        )

    def _make_variable_holder(self, way: ReferencePath, variable: Variable, kind: str) -> Holder:
        name, place = variable.name, variable.place
        where = str(place) if place.line else str(place).rpartition(":")[0]
        shown, full_name, grouped = way.shown(name, kind)
        is_whole = isinstance(way.obj, Distribution)  # of no use without one of its parameters
        if is_whole:
            full_name = name
        return Holder(
            kind="variable",
            text=f"{where} {shown}",
            key=f"{variable.home} {grouped}",
            name=full_name,
            owner=way.owner(name) or full_name,
            container=way.find_outermost_container(f"{variable.home} {name}"),
            containers=way.containers,
            is_keyed=way.is_keyed,
            gathers=way.gathers,
            is_part=bool(way.path) and not is_whole,
            part="".join((name, *("[..]" if ENTRIES.fullmatch(step) else step for step in way.path))),
            is_cache=CACHED in way.path,
            is_cycle=CYCLED in way.path,
            is_tee=TEED in way.path,
            place=place,
            stored_in=stored_in(way, name, place.file),
            reads=variable.reads,
            is_state=variable.is_carried,
        )

    def _extend_outwards(
        self, referrer: Any, inner: list[ReferencePath]
    ) -> Iterator[tuple[ReferencePath, ReferencePath]]:
        """Yield pairs of a path from `referrer` and the path in `inner` that it extends.

        Each named entry of `referrer` gets a path of its own. Entries without names share one path if their paths in
        `inner` are equal.
        """
        if isinstance(referrer, dict) and _is_of_module(referrer):
            for way in inner:
                names = [name for name, value in list(dict.items(referrer)) if value is way.obj]
                whole = way.including_its_object()
                yield from ((replace(whole, obj=referrer, path=(f"['{name}']", *way.path)), way) for name in names)
            return
        labels = map_labels(referrer)
        gathered: dict[tuple[str, ...], tuple[ReferencePath, ReferencePath]] = {}
        for way in inner:
            is_namespace = isinstance(referrer, type) or getattr(referrer, "__dict__", None) is way.obj
            inside = way if is_namespace else way.including_its_object()
            if labels is None:
                container = way.container if isinstance(referrer, nn.Module) else None
                yield replace(inside, obj=referrer, container=container), way
            elif (label := labels.get(id(way.obj))) is not None:
                container = tuple if isinstance(referrer, tuple) else way.container
                path = (label, *way.path)
                yield replace(inside, obj=referrer, path=path, container=container), way
            elif (same := gathered.get(way.path)) is None:
                n = n_entries(referrer)
                label = f"[{n} entr{'y' if n == 1 else 'ies'}]"
                kind = next((k for k in CONTAINERS if isinstance(referrer, k)), type(referrer))
                path = (label, *way.path)
                outer = replace(
                    inside, obj=referrer, tensors=set(way.tensors), path=path, container=kind, outermost=kind
                )
                gathered[way.path] = outer, way
            else:
                same[0].tensors |= way.tensors
                same[0].containers = merged(same[0].containers, inside.containers)
        yield from gathered.values()

    def _find_named_holder(self, way: ReferencePath, inner: ReferencePath) -> Holder | None:
        """Make the holder if the path `way` begins at a named object. Otherwise update `way` and return None.

        `inner` is the path that `way` extends by one reference.
        """
        obj = way.obj
        if isinstance(obj, dict):
            return self._find_namespace_holder(way, obj)
        if isinstance(obj, nn.Module):
            return self._make_module_holder(way, inner)
        if isinstance(obj, BackwardCFunction) and not is_of_torch(type(obj)):
            return make_context_holder(way, obj)
        if isinstance(obj, BaseException):
            return self._make_exception_holder(way, obj)
        if isinstance(obj, GeneratorType | CoroutineType | AsyncGeneratorType):
            return self._make_generator_holder(way, inner, obj)
        if isinstance(obj, FunctionType):
            return self._find_function_holder(way, inner, obj)
        if isinstance(obj, type):
            is_special = bool(way.path) and attribute_name(way.path[0]).startswith("__")  # Python's own, or a mock's
            return None if is_special else make_class_holder(way, obj)
        if isinstance(obj, FrameType):
            inside = find_name_in_frame(obj, inner.obj)
            way.path = (f"['{inside}']", *inner.path) if inside else inner.path
        elif isinstance(obj, TracebackType | CellType | MethodType | tuple | list | deque | set | frozenset):
            pass
        elif isinstance(obj, functools.partial):
            way.path = (".args" if inner.obj is obj.args else ".keywords", *inner.path)
        elif isinstance(obj, functools._lru_cache_wrapper):
            way.path = (CACHED, *way.path)
        elif isinstance(obj, threading.local) and way.path[1:]:  # through a dict of the dicts of all threads
            way.path = (f".{attribute_name(way.path[1])}", *way.path[2:])
        elif type(obj).__name__.startswith("hamt_"):
            return make_context_variable_holder(way, inner)
        elif isinstance(obj, itertools.cycle):
            way.path = (CYCLED, *way.path)
        elif type(obj).__name__ == "_tee":
            way.path = (TEED, *way.path)
        else:
            if getattr(obj, "__dict__", None) is inner.obj and way.path:
                way.path = (f".{attribute_name(way.path[0])}", *way.path[1:])
            elif (held_as := _find_holding_attribute(obj, inner.obj)) is not None:
                way.path = (f".{held_as}", *inner.path)
            else:
                return None
            if is_user_code(type(obj)):
                self._follow_links(way, inner)
                way.attribute, way.file = f"{type(obj).__qualname__}{way.text}", find_defining_file(type(obj))
        return None

    def _follow_links(self, way: ReferencePath, inner: ReferencePath) -> None:
        """Replace the object of `way` by the head of the linked list that contains it, if there is one.

        The path then reads as if the object were an entry of a Python list of the same length.
        """
        head = self.linked.find_head(way.obj)
        if head is not None:
            path = inner.path if type(inner.obj) is type(way.obj) else way.path
            way.obj, way.containers = head[0], merged(way.containers, {id(head[0]): head[1]})
            way.path = (f"[{head[1]} entries]", *path)

    def _make_generator_holder(self, way: ReferencePath, inner: ReferencePath, generator: Any) -> Holder:
        kind, prefix = _GENERATORS[type(generator)]
        code = getattr(generator, f"{prefix}_code")
        if way.attribute and origin(code.co_filename) != "user":
            text, name = f"attribute {way.attribute}, through the iterator of a loop", ENTRIES.sub("", way.attribute)
            return Holder(
                kind="iterator",
                text=text,
                key=f"attribute {name}",
                name=name,
                containers=way.containers,
                is_keyed=way.is_keyed,
                stored_in=stored_in(way, name, way.file),
            )
        frame = getattr(generator, f"{prefix}_frame")
        local = find_name_in_frame(frame, inner.obj) if frame is not None else None
        return self._make_code_holder("generator", f"{kind} '{generator.__name__}'", code, way, local)

    def _find_function_holder(self, way: ReferencePath, inner: ReferencePath, function: FunctionType) -> Holder | None:
        hook = self.hooks.by_function.get(id(function))
        if hook is not None:
            return Holder(kind="hook", text=str(hook), key=f"hook {hook.place}", place=hook.place)
        if inner.obj is vars(function):
            way.path = (f".{attribute_name(way.path[0])}", *way.path[1:])
            return None
        place = Place(function.__code__.co_filename, function.__code__.co_firstlineno)
        local = _find_function_variable(function, inner)
        way.path = way.path[1:] if local else way.path
        if local and self._is_gathered(function):
            way.path = (f".{local}", *way.path)
            return None
        kind = "default argument" if inner.obj is function.__defaults__ else "closure"
        text = f"{kind} of '{function.__qualname__}' at {place}"
        return self._make_code_holder("closure", text, function.__code__, way, local)

    def _make_code_holder(self, kind: str, text: str, code: CodeType, way: ReferencePath, local: str | None) -> Holder:
        """Make the holder for a suspended or stored function that `text` describes.

        Its variable `local` leads to the tensors. If `local` is None, the holder names the function only.
        """
        if local is None:
            return Holder(kind=kind, text=text, key=text, containers=way.containers)
        shown, name, grouped = way.shown(local, "variable")
        return Holder(
            kind=kind, text=f"{text}, its {shown}", key=f"{text} {grouped}", name=name, containers=way.containers
        )

    def _find_namespace_holder(self, way: ReferencePath, namespace: dict[str, Any]) -> Holder | None:
        name = attribute_name(way.path[0])
        if namespace is vars(builtins):
            if name == "_":
                return Holder(kind="notebook", text="'_', the result of the last line", key="notebook _", name="_")
            return None
        if not _is_of_module(namespace):
            return None
        inner = replace(way, obj=namespace.get(name), path=way.path[1:])
        if "__name__" in namespace and namespace["__name__"] == "__main__" and _is_output(name):
            is_history = name in ("Out", "_oh") and bool(inner.path)
            text = f"notebook history {'Out' + inner.path[0] if is_history else repr(name)}"
            return Holder(kind="notebook", text=text, key=f"notebook {name}", name=name)
        variable = self.variables.find_module_variable(namespace, name)
        holder = self._make_variable_holder(inner, variable, "global variable")
        hook = self.hooks.find_by_global(namespace, name)
        if hook is not None:
            return Holder(kind="hook", text=str(hook), key=f"hook {hook.place}", place=hook.place)
        return holder

    def _make_module_holder(self, way: ReferencePath, inner: ReferencePath) -> Holder:
        name = self.modules.get(id(way.obj), type(way.obj).__name__)
        path = way.path
        if vars(way.obj) is not inner.obj:  # since Python 3.13 objects refer to their attributes directly
            path = (f".{_find_holding_attribute(way.obj, inner.obj) or '?'}", *path)
        attribute = attribute_name(path[0]) if path else "?"
        if attribute in ("_buffers", "_parameters", "_modules") and len(path) > 1:
            attribute, path = attribute_name(path[1]), path[1:]
        hook = self.hooks.find_in_table(way.obj, attribute)
        if hook is not None:
            return Holder(kind="hook", text=str(hook), key=f"hook {hook.place}", place=hook.place)
        text = f"{name}.{attribute}" + "".join(path[1:])
        alike = without_numbers(f"{name}.{attribute}")  # equal layers are one holder
        gathers = is_container(way.container) and len(path) > 1 and path[1].startswith("[")
        return Holder(
            kind="module",
            text=text,
            key=alike,
            name=attribute,
            containers=way.containers,
            gathers=gathers,
            is_state=is_carried(type(way.obj), attribute),
            stored_in=stored_in(replace(way, path=tuple(path[1:])), attribute, find_defining_file(type(way.obj))),
        )

    def _make_exception_holder(self, way: ReferencePath, error: BaseException) -> Holder:
        kind = type(error).__name__
        handled = _list_handled_exceptions()
        if id(error) in handled:
            return Holder(kind="exception", text=f"exception being handled ({kind})", key=f"exception {kind}")
        target = (0, error)
        search = replace(self, ignored={*self.ignored, id(target), id(way), id(way.tensors)})
        for holder in search.holders([target]).get(0, ()):
            if holder.kind != "exception":
                text = f"exception {kind} in {holder.text}"
                return Holder(kind="exception", text=text, key=f"exception {kind}", name=holder.name)
        return Holder(kind="exception", text=f"exception {kind} that is kept", key=f"exception {kind}")

    def _is_gathered(self, function: FunctionType) -> bool:
        """Return True if `function` is an entry of a list, set or deque. Each code object is searched for only once."""
        if function.__code__ not in self.gathered:
            others = (r for r in gc.get_referrers(function) if id(r) not in self.ignored)
            self.gathered[function.__code__] = any(isinstance(r, list | deque | set) for r in others)
        return self.gathered[function.__code__]

    def _is_ours(self, obj: Any) -> bool:
        if isinstance(obj, FrameType):
            return self.variables.is_running(obj) or origin(obj.f_code.co_filename) == "ours"
        if isinstance(obj, FunctionType):
            return origin(obj.__code__.co_filename) == "ours"
        if isinstance(obj, GeneratorType):
            return obj.gi_code is HolderSearch._extend_outwards.__code__
        return type(obj) in (ReferencePath, HolderSearch, RunningFrames) or isinstance(obj, BuiltinFunctionType)


def _is_of_module(namespace: dict[str, Any]) -> bool:
    """Return True if the dict holds the global variables of a module, imported or not."""
    if "__name__" not in namespace:
        return False
    module = sys.modules.get(namespace["__name__"]) if isinstance(namespace["__name__"], str) else None
    return "__builtins__" in namespace or (isinstance(module, ModuleType) and vars(module) is namespace)


def _list_handled_exceptions() -> set[int]:
    """Return the ids of the exceptions that `except` blocks are handling now, and of their causes."""
    handled: set[int] = set()
    error = sys.exc_info()[1]
    while error is not None and id(error) not in handled:
        handled.add(id(error))
        error = error.__cause__ or error.__context__
    return handled


def _add_holder(holders_of: dict[int, list[Holder]], way: ReferencePath, holder: Holder) -> None:
    for number in way.tensors:
        holders = holders_of.setdefault(number, [])
        if all(other.key != holder.key for other in holders):
            holders.append(holder)


def _find_referrers(things: tuple[Any, ...]) -> list[Any]:
    """Return all objects that refer to an item of `things`, except the tuple `things` itself."""
    if len(things) <= _MANY:
        return gc.get_referrers(*things)
    numbers, own = {id(obj) for obj in things}, id(things)
    objects = gc.get_objects()
    return [o for o in objects if not numbers.isdisjoint(map(id, gc.get_referents(o))) and id(o) != own]


def _list_referents(obj: Any) -> Iterable[Any]:
    """Return the objects that `obj` refers to. For a NumPy array of objects, `gc.get_referents` does not list them."""
    return obj.flat if is_array_of_objects(obj) else gc.get_referents(obj)


def _find_function_variable(function: FunctionType, inner: ReferencePath) -> str | None:
    """Return the name of the closure variable or argument by which a function refers to the object of `inner`.

    Return None if the function refers to the object in another way.
    """
    if not inner.path or not inner.path[0].strip("[]").isdigit():
        return None
    index = int(inner.path[0].strip("[]"))
    if inner.obj is function.__closure__:
        return function.__code__.co_freevars[index]
    if inner.obj is function.__defaults__:
        arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
        return arguments[index - len(function.__defaults__)]
    return None


def _find_holding_attribute(obj: Any, inner: Any) -> str | None:
    """Return the name of the attribute of `obj` that refers to `inner`; None if there is none. No property is run."""
    slots = [name for cls in type(obj).__mro__ for name in cls.__dict__.get("__slots__", ())]
    for name in slots if not hasattr(obj, "__dict__") else [*vars(obj), *slots]:
        try:
            if object.__getattribute__(obj, name) is inner:
                return str(name)
        except AttributeError:
            continue
    return None
