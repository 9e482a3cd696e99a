"""Who holds an object, as a person would say it: found by asking the garbage collector, step by step, who refers to it.

Each way from a tensor outwards ends at something that has a name: a variable, a module, a hook, an exception.
"""

from __future__ import annotations

import builtins
import gc
import re
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
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

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from lowtide._code import origin
from lowtide.watching.places import Place
from lowtide.watching.variables import Variables, name_in_frame

if TYPE_CHECKING:
    from lowtide.watching.hooks import Hooks

LEVELS = 9
"""References between a tensor and what is named."""

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
    """Entries of the list or set that the tensors are in, if there is one in between that can grow without end."""
    place: Place | None = None


@dataclass(slots=True)
class _Way:
    """A way from tensors (by number) to `thing`, which holds them by `path`, written from the outside inwards."""

    thing: Any
    tensors: set[int]
    path: tuple[str, ...] = ()
    entries: int | None = None
    container: type | None = None


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

    def holders(self, tensors: Iterable[tuple[int, Tensor]]) -> dict[int, list[Holder]]:
        """For each tensor, by its number, who holds it; nearest first. None for those that only C++ holds."""
        found: dict[int, list[Holder]] = {}
        ways = [_Way(tensor, {number}) for number, tensor in tensors]
        seen = {id(way.thing) for way in ways}
        for _ in range(LEVELS):
            if not ways:
                break
            by_id = {id(way.thing): way for way in ways}
            for way in ways:
                for holder in self._running(way):
                    _add(found, way, holder)
            referrers = gc.get_referrers(*(way.thing for way in ways))
            self.ignored.add(id(referrers))
            outward: list[_Way] = []
            for referrer in referrers:
                if id(referrer) in seen or id(referrer) in self.ignored or self._is_ours(referrer):
                    continue
                met = {id(r): by_id[id(r)] for r in gc.get_referents(referrer) if id(r) in by_id}
                inner = list(met.values())
                for way in self._outward(referrer, inner):
                    named = self._named(way, inner[0])
                    if named is not None:
                        _add(found, way, named)
                    elif id(referrer) not in seen:  # what has a name is met again on other ways
                        seen.add(id(referrer))
                        outward.append(way)
            ways = outward
        return found

    def _running(self, way: _Way) -> list[Holder]:
        return [self._variable(way, v.name, v.place, "local variable") for v in self.variables.referring_to(way.thing)]

    def _variable(self, way: _Way, name: str, place: Place, what: str) -> Holder:
        where = str(place) if place.line else str(place).rpartition(":")[0]
        if way.container in (list, deque, set) and way.path and way.path[0].startswith("["):
            assert way.container is not None
            of = way.container.__name__
            return Holder(
                kind="variable",
                text=f"{where} {of} '{name}' {_path(way.path)}",
                key=f"{place.file} {name}",
                name=name,
                entries=way.entries,
                place=place,
            )
        text = f"{where} {what} '{name}'" + (f" -> {_path(way.path)}" if way.path else "")
        return Holder(kind="variable", text=text, key=f"{place.file} {name}", name=name, place=place)

    def _outward(self, referrer: Any, inner: list[_Way]) -> list[_Way]:
        """The ways through `referrer`, one for each thing that it holds; containers of equals count as one."""
        if not inner:
            return []
        if isinstance(referrer, list | tuple | deque | set | frozenset):
            tensors = set().union(*(way.tensors for way in inner))
            n = len(referrer)
            label = f"[{n} entr{'y' if n == 1 else 'ies'}]"
            rest = inner[0].path if len(inner) == 1 or inner[0].path else ()
            if isinstance(referrer, tuple) or (n == 1 and isinstance(referrer, frozenset)):
                index = next((i for i, thing in enumerate(referrer) if thing is inner[0].thing), 0)
                return [_Way(referrer, tensors, (f"[{index}]", *rest), n, tuple)]
            kind = next(k for k in (list, deque, set, frozenset) if isinstance(referrer, k))
            is_bounded = isinstance(referrer, deque) and referrer.maxlen is not None  # a queue: it grows so far only
            return [_Way(referrer, tensors, (label, *rest), None if is_bounded else n, kind)]
        if isinstance(referrer, dict):
            ways = []
            for way in inner:
                keys = [key for key, value in referrer.items() if value is way.thing]
                key = keys[0] if keys else "?"
                ways.append(_Way(referrer, way.tensors, (f"[{key!r}]", *way.path), way.entries, way.container))
            return ways
        return [_Way(referrer, way.tensors, way.path, way.entries, way.container) for way in inner]

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
            text = f"generator '{thing.__name__}'" + (f", its variable '{local}'" if local else "")
            return Holder(kind="generator", text=text, key=text, name=local or "")
        if isinstance(thing, FunctionType):
            hook = self.hooks.by_function.get(id(thing))
            if hook is not None:
                return Holder(kind="hook", text=str(hook), key=f"hook {hook.place}", place=hook.place)
            place = Place(thing.__code__.co_filename, thing.__code__.co_firstlineno)
            text = f"closure of '{thing.__qualname__}' at {place}"
            return Holder(kind="closure", text=text, key=text, place=place)
        if isinstance(thing, type):
            text = f"class attribute {thing.__qualname__}.{_attribute(way.path[0]) if way.path else '?'}"
            return Holder(kind="class", text=text, key=text)
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
        holder = self._variable(inner, name, variable.place, "global variable")
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
        stable = re.sub(r"\[\d+ entr(y|ies)\]", "", text)
        return Holder(kind="module", text=text, key=stable, name=attribute, entries=way.entries)

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
