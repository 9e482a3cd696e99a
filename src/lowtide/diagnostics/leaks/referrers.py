"""Who holds an object, as a person would say it: found by asking the garbage collector, step by step, who refers to it.

Each way from a tensor outwards ends at something that has a name: a variable, a module, a hook, an exception.
"""

from __future__ import annotations

import builtins
import gc
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile
from types import (
    BuiltinFunctionType,
    CellType,
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

from lowtide.diagnostics.leaks.call_site import Place
from lowtide.diagnostics.leaks.running_frames import Variables, name_in_frame
from lowtide.state.introspection import origin

if TYPE_CHECKING:
    from lowtide.diagnostics.leaks.registered_hooks import Hooks

LEVELS = 9
"""References between a tensor and what is named."""

MOST_TENSORS = 2_000
"""Things whose referrers are looked for at once."""

_MANY = 256
"""So many things at once, and a search of our own is faster than `gc.get_referrers`: that compares each with each."""

RANK = ("exception", "notebook", "hook", "module", "context", "closure", "generator", "variable", "class", "gradient")
"""Kinds of holders; where there are several, the first one is said to be at fault."""

_OUTPUT_NAME = re.compile(r"_+|_[oi]*\d+|_oh|Out|_i+|_ih|In")


def _is_output(name: str) -> bool:
    """Whether a prompt or a notebook gives such names to results; in a script `_` is what its author calls so."""
    return bool(_OUTPUT_NAME.fullmatch(name)) and (hasattr(sys, "ps1") or "IPython" in sys.modules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Something named that keeps tensors alive: `text` for people; `key` stays the same from step to step."""

    kind: str
    text: str
    key: str
    name: str = ""
    entries: int | None = None
    """Entries of the lists, dicts and sets in between that can grow without end, added up; None without any."""
    gathers: bool = False
    """Whether it is a list, or another container whose entries have no names."""
    place: Place | None = None


@dataclass(slots=True)
class _Way:
    """A way from tensors (by number) to `thing`, which holds them by `path`, written from the outside inwards."""

    thing: Any
    tensors: set[int]
    path: tuple[str, ...] = ()
    entries: int | None = None
    """Entries of the containers inside of `thing`."""
    container: type | None = None

    @property
    def all_entries(self) -> int | None:
        """With those of `thing`."""
        is_queue = isinstance(self.thing, deque) and self.thing.maxlen is not None  # it grows so far only
        if is_queue or not isinstance(self.thing, list | deque | set | dict):
            return self.entries
        return len(self.thing) + (self.entries or 0)


@dataclass(slots=True)
class Search:
    """A search for holders, with what exists around it. Used once, and dropped with all that it found on the way."""

    modules: dict[int, str]
    """Names of modules by id, as `model.encoder`."""
    hooks: Hooks
    ignored: set[int] = field(default_factory=set)
    variables: Variables = field(default_factory=Variables)
    namespaces: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType):
                self.namespaces[id(vars(module))] = name

    def holders(self, tensors: Iterable[tuple[int, Any]]) -> dict[int, list[Holder]]:
        """For each tensor, by its number, who holds it; nearest first. None for those that only C++ holds.

        Of more than MOST_TENSORS the later ones are found where they are together with one of the first.
        """
        found: dict[int, list[Holder]] = {}
        ways = [_Way(tensor, {number}) for number, tensor in tensors]
        seen: dict[int, set[int]] = {}  # things -> the tensors with ways through them
        for _ in range(LEVELS):
            if not ways:
                break
            by_id: dict[int, list[_Way]] = {}
            for way in ways:
                by_id.setdefault(id(way.thing), []).append(way)
                seen.setdefault(id(way.thing), set()).update(way.tensors)
                for variable in self.variables.referring_to(way.thing):
                    name, place, entries = variable.name, variable.place, way.all_entries
                    _add(found, way, self._variable(way, name, place, "local variable", entries))
            referrers = _referring_to(tuple(same[0].thing for same in islice(by_id.values(), MOST_TENSORS)))
            self.ignored.add(id(referrers))
            ways = []
            for referrer in referrers:
                if id(referrer) in self.ignored or self._is_ours(referrer):
                    continue
                met = dict.fromkeys(number for r in gc.get_referents(referrer) if (number := id(r)) in by_id)
                known = seen.setdefault(id(referrer), set())
                for way, inner in self._outward(referrer, [way for number in met for way in by_id[number]]):
                    if way.tensors <= known:
                        continue
                    named = self._named(way, inner)
                    if named is not None:  # and met again on other ways
                        _add(found, way, named)
                    else:
                        known |= way.tensors
                        ways.append(way)
        return found

    def _variable(self, way: _Way, name: str, place: Place, what: str, entries: int | None) -> Holder:
        where = str(place) if place.line else str(place).rpartition(":")[0]
        shown, full_name = _shown(way, name, what)
        return Holder(
            kind="variable",
            text=f"{where} {shown}",
            key=f"{place.file} {full_name}",
            name=full_name,
            entries=entries,
            gathers=_gathers(way),
            place=place,
        )

    def _outward(self, referrer: Any, inner: list[_Way]) -> Iterator[tuple[_Way, _Way]]:
        """The ways through `referrer`, each with the one that it goes on from.

        One for each thing in it that has a name there; what has none counts as one, and is known by its first.
        """
        labels = _labels(referrer)
        gathered: _Way | None = None
        for way in inner:
            is_namespace = isinstance(referrer, type) or getattr(referrer, "__dict__", None) is way.thing
            entries = way.entries if is_namespace else way.all_entries
            if labels is None:
                yield _Way(referrer, way.tensors, way.path, entries), way
            elif (label := labels.get(id(way.thing))) is not None:
                container = tuple if isinstance(referrer, tuple) else way.container
                yield _Way(referrer, way.tensors, (label, *way.path), entries, container), way
            elif gathered is None:
                n = len(referrer)
                label = f"[{n} entr{'y' if n == 1 else 'ies'}]"
                kind = next(k for k in _CONTAINERS if isinstance(referrer, k))
                gathered = _Way(referrer, set(way.tensors), (label, *way.path), entries, kind)
            else:
                gathered.tensors |= way.tensors
                gathered.entries = max(gathered.entries or 0, entries or 0) or None
        if gathered is not None:
            yield gathered, inner[0]

    def _named(self, way: _Way, inner: _Way) -> Holder | None:
        """What `way` has come to, if that has a name; otherwise the way goes on from there."""
        thing = way.thing
        if isinstance(thing, dict):
            return self._namespace(way, thing)
        if isinstance(thing, nn.Module):
            return self._module(way, inner)
        if isinstance(thing, BackwardCFunction):
            attribute = _attribute(way.path[0]) if way.path else "?"
            of = type(thing).__name__.removesuffix("Backward")
            text = f"ctx attribute '{attribute}' of {of}"
            return Holder(kind="context", text=text, key=f"ctx {of} {attribute}", name=attribute)
        if isinstance(thing, BaseException):
            return self._exception(way, thing)
        if isinstance(thing, GeneratorType):
            frame = thing.gi_frame
            local = name_in_frame(frame, inner.thing) if frame is not None else None
            return self._inside("generator", f"generator '{thing.__name__}'", way, local)
        if isinstance(thing, FunctionType):
            hook = self.hooks.by_function.get(id(thing))
            if hook is not None:
                return Holder(kind="hook", text=str(hook), key=f"hook {hook.place}", place=hook.place)
            place = Place(thing.__code__.co_filename, thing.__code__.co_firstlineno)
            is_closed_over = inner.thing is thing.__closure__
            local = thing.__code__.co_freevars[int(way.path[0].strip("[]"))] if is_closed_over else None
            way.path = way.path[1:] if is_closed_over else way.path
            return self._inside("closure", f"closure of '{thing.__qualname__}' at {place}", way, local)
        if isinstance(thing, type):
            name = f"{thing.__qualname__}.{_attribute(way.path[0]) if way.path else '?'}"
            text = f"class attribute {name}{_path(way.path[1:])}"
            return Holder(kind="class", text=text, key=f"class attribute {name}", name=name, entries=way.entries)
        if isinstance(thing, FrameType):
            inside = name_in_frame(thing, inner.thing)
            way.path = (f"['{inside}']", *inner.path) if inside else inner.path
        elif isinstance(thing, TracebackType | CellType | MethodType | tuple | list | deque | set | frozenset):
            pass
        elif getattr(thing, "__dict__", None) is inner.thing and way.path:
            way.path = (f".{_attribute(way.path[0])}", *way.path[1:])
        elif (held_as := _holding_attribute(thing, inner.thing)) is not None:
            way.path = (f".{held_as}", *inner.path)
        return None

    def _inside(self, kind: str, text: str, way: _Way, local: str | None) -> Holder:
        """A function's variable `local`, where the function does not run now."""
        if local is None:
            return Holder(kind=kind, text=text, key=text, entries=way.entries)
        shown, name = _shown(way, local, "variable")
        return Holder(kind=kind, text=f"{text}, its {shown}", key=f"{text} {name}", name=name, entries=way.entries)

    def _namespace(self, way: _Way, namespace: dict[str, Any]) -> Holder | None:
        name = _attribute(way.path[0])
        if namespace is vars(builtins):
            if name == "_":
                return Holder(kind="notebook", text="'_', the result of the last line", key="notebook _", name="_")
            return None
        is_module = id(namespace) in self.namespaces or ("__name__" in namespace and "__builtins__" in namespace)
        if not is_module:
            return None
        inner = _Way(None, way.tensors, way.path[1:], way.entries, way.container)
        if "__name__" in namespace and namespace["__name__"] == "__main__" and _is_output(name):
            is_history = name in ("Out", "_oh") and bool(inner.path)
            text = f"notebook history {'Out' + inner.path[0] if is_history else repr(name)}"
            return Holder(kind="notebook", text=text, key=f"notebook {name}", name=name)
        variable = self.variables.of_module(namespace, name)
        holder = self._variable(inner, name, variable.place, "global variable", way.entries)
        hook = self.hooks.using_global(namespace, name)
        if hook is not None:
            return Holder(kind="hook", text=str(hook), key=f"hook {hook.place}", place=hook.place)
        return holder

    def _module(self, way: _Way, inner: _Way) -> Holder:
        name = self.modules.get(id(way.thing), type(way.thing).__name__)
        path = way.path
        if vars(way.thing) is not inner.thing:  # since Python 3.13 objects refer to their attributes themselves
            path = (f".{_holding_attribute(way.thing, inner.thing) or '?'}", *path)
        attribute = _attribute(path[0]) if path else "?"
        if attribute in ("_buffers", "_parameters", "_modules") and len(path) > 1:
            attribute, path = _attribute(path[1]), path[1:]
        text = f"{name}.{attribute}" + _path(path[1:])
        alike = re.sub(r"\.\d+(?=\.)", ".*", f"{name}.{attribute}")  # layers of one kind are one holder
        return Holder(kind="module", text=text, key=alike, name=attribute, entries=way.entries)

    def _exception(self, way: _Way, error: BaseException) -> Holder:
        kind = type(error).__name__
        handled = _handled()
        if id(error) in handled:
            return Holder(kind="exception", text=f"exception being handled ({kind})", key=f"exception {kind}")
        for variable in self.variables.referring_to(error):
            text = f"exception {kind} in {variable.place} local variable '{variable.name}'"
            return Holder(kind="exception", text=text, key=f"exception {kind}", name=variable.name)
        for referrer in gc.get_referrers(error):
            if isinstance(referrer, dict) and ("__builtins__" in referrer or id(referrer) in self.namespaces):
                name = next((str(key) for key, value in list(referrer.items()) if value is error), "?")
                variable = self.variables.of_module(referrer, name)
                text = f"exception {kind} in {variable.place} global variable '{name}'"
                return Holder(kind="exception", text=text, key=f"exception {kind}", name=name)
        return Holder(kind="exception", text=f"exception {kind} that is kept", key=f"exception {kind}")

    def _is_ours(self, thing: Any) -> bool:
        if isinstance(thing, FrameType):
            return self.variables.is_running(thing) or origin(thing.f_code.co_filename) == "ours"
        if isinstance(thing, FunctionType):
            return origin(thing.__code__.co_filename) == "ours"
        return type(thing) in (_Way, Search, Variables) or isinstance(thing, BuiltinFunctionType)


def _handled() -> set[int]:
    """The exceptions whose `except` blocks are running, and what they came from."""
    found: set[int] = set()
    error = sys.exc_info()[1]
    while error is not None and id(error) not in found:
        found.add(id(error))
        error = error.__cause__ or error.__context__
    return found


def _add(found: dict[int, list[Holder]], way: _Way, holder: Holder) -> None:
    for number in way.tensors:
        holders = found.setdefault(number, [])
        if all(other.key != holder.key for other in holders):
            holders.append(holder)


def _attribute(step: str) -> str:
    """`['name']` and `.name` -> `name`."""
    return step.removeprefix(".").removeprefix("['").removesuffix("']")


def _referring_to(things: tuple[Any, ...]) -> list[Any]:
    """All objects that refer to one of these, but for `things` itself."""
    if len(things) <= _MANY:
        return gc.get_referrers(*things)
    numbers, own = {id(thing) for thing in things}, id(things)
    objects = gc.get_objects()
    return [o for o in objects if not numbers.isdisjoint(map(id, gc.get_referents(o))) and id(o) != own]


_CONTAINERS = (list, deque, set, frozenset, dict)


def _labels(container: Any) -> dict[int, str] | None:
    """Things by id -> the names that a tuple or dict has for them; None for what is no container."""
    if isinstance(container, tuple):
        return {id(thing): f"[{index}]" for index, thing in enumerate(container)}
    if isinstance(container, dict):
        return {id(thing): f"[{key!r}]" for key, thing in list(dict.items(container)) if isinstance(key, str)}
    return {} if isinstance(container, _CONTAINERS) else None


def _gathers(way: _Way) -> bool:
    return way.container in _CONTAINERS and bool(way.path) and way.path[0].startswith("[")


def _shown(way: _Way, name: str, what: str) -> tuple[str, str]:
    """How to call a variable that holds tensors by this way, and its name with the attributes that lead on from it."""
    attributes = takewhile(lambda step: step.startswith("."), way.path)
    if _gathers(way):
        assert way.container is not None
        shown = f"{way.container.__name__} '{name}' {_path(way.path)}"
    else:
        shown = f"{what} '{name}'" + (f" -> {_path(way.path)}" if way.path else "")
    return shown, "".join((name, *attributes))


def _path(path: tuple[str, ...]) -> str:
    return "".join(path)


def _holding_attribute(thing: Any, inner: Any) -> str | None:
    """The attribute of an object by which it refers to `inner`, without running any property."""
    slots = [name for cls in type(thing).__mro__ for name in cls.__dict__.get("__slots__", ())]
    for name in slots if not hasattr(thing, "__dict__") else [*vars(thing), *slots]:
        try:
            if object.__getattribute__(thing, name) is inner:
                return str(name)
        except AttributeError:
            continue
    return None
