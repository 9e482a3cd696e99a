"""What a step changes besides the model: modules, schedulers, scalers, generators, tensors that its code refers to.

A rehearsed step is a real one. It moves a learning-rate scheduler on, averages weights into a second model, counts in a
batch norm of a teacher. None of these is named in the call, so they are looked for where the step's code can find them:
closures, globals and methods that it names, attributes, containers. Only what has contents of its own to put back is
taken. Plain attributes are left as the step leaves them: they may speak of files, threads and iterators, which nobody
can put back.
"""

from __future__ import annotations

import functools
import itertools
import random
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from lowtide._code import Named, is_opaque, is_users, variables
from lowtide._slots import in_slots
from lowtide._torch import scaler_stages, set_scaler_stages
from lowtide.memory.entry import set_aside

LARGEST = 1000
"""Lists, tuples and sets with more entries are data, not state: they are left alone, as are data sets and loaders. Of
dicts with more entries only tensors and modules are looked at."""

LARGEST_BYTES = 1 << 28
"""As are larger tensors, unless a module owns them."""

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

_LEAVES = (str, bytes, int, float, complex, bool, type(None), types.ModuleType, types.BuiltinFunctionType)
_COLLECTIONS: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
_DATA = {"datasets", "multiprocessing", "queue"}
"""Packages of data and of what hands it over: their objects are not looked into either."""


class Reached:
    """Every module, tensor and object with a `state_dict` that can be reached from `roots`. Nothing of them is run."""

    def __init__(self, *roots: Any) -> None:
        self.modules: list[nn.Module] = []
        self.tensors: list[Tensor] = []
        self.places: list[tuple[Any, Any, Any]] = []
        """Dicts, lists and variables that hold a tensor or several, or nothing yet: container, key, content."""
        self.stateful: list[Any] = []
        """Schedulers, gradient scalers, and what else has `state_dict` and `load_state_dict`."""
        self.generators: list[Any] = []
        """Of random numbers: torch's, NumPy's and Python's."""
        self._named = Named("forward")  # `model(x)` leads there
        self._seen: dict[int, Any] = {}  # holds them, so that no address is used twice
        pending = deque(roots)
        while pending:
            thing = pending.popleft()
            if isinstance(thing, types.BuiltinFunctionType):
                thing = thing.__self__  # as `random.Random(0).random`
            if not isinstance(thing, _LEAVES) and id(thing) not in self._seen and self._is_of_interest(thing):
                self._seen[id(thing)] = thing
                pending.extend(self._look_at(thing))

    def _is_of_interest(self, thing: Any) -> bool:
        """Whether `thing` is to be looked at."""
        return True

    @property
    def things(self) -> Collection[Any]:
        """All that was looked at."""
        return self._seen.values()

    def _look_at(self, thing: Any) -> Iterable[Any]:
        """Take `thing` if it is one of those looked for. Gives what it refers to."""
        if isinstance(thing, Tensor):
            if is_state(thing):
                self.tensors.append(thing)
            return ()
        if isinstance(thing, dict):
            entries = dict.items(thing)  # past methods of a class of its own, which may make something when asked
            if len(entries) <= LARGEST:
                return self._entries(thing, entries)
            return self._entries(thing, [(key, x) for key, x in entries if isinstance(x, Tensor | nn.Module)])
        if (kind := next((kind for kind in _COLLECTIONS if isinstance(thing, kind)), None)) is not None:
            if kind.__len__(thing) > LARGEST:
                return ()
            inside = list(kind.__iter__(thing))
            return self._entries(thing, enumerate(inside)) if kind is list else inside
        if isinstance(thing, types.FunctionType):
            for container, key, content in variables(thing):
                self._entries(container, [(key, content)])  # bound anew by `global` and `nonlocal`
            return (*referred_to(thing), *self._named.code(thing))
        if isinstance(thing, type):
            return self._named.thing(thing)
        if isinstance(thing, types.MethodType):
            return (thing.__self__, thing.__func__)
        if isinstance(thing, functools.partial):
            return (thing.func, thing.args, thing.keywords)
        if isinstance(thing, Optimizer | Dataset | DataLoader | Sampler):  # an optimizer is noticed as it steps
            return ()
        if is_generator(thing):
            self.generators.append(thing)
            return ()
        attributes = getattr(thing, "__dict__", None)
        defined_in = type(thing).__module__
        if is_opaque(type(thing)) or defined_in.partition(".")[0] in _DATA:
            return ()
        if type(attributes) is not dict:
            return (*in_slots(thing), *self._named.thing(thing)) if is_users(type(thing)) else ()
        if defined_in.startswith("torch.distributed.") and not isinstance(thing, nn.Module):
            return ()  # as of FSDP: tensors that have memory for a while
        if isinstance(thing, nn.Module):
            self.modules.append(thing)
        elif _has_state(type(thing)):
            self.stateful.append(thing)
        return (attributes, vars(type(thing)).get("__call__"), *self._named.thing(thing))

    def _entries(self, container: Any, entries: Iterable[tuple[Any, Any]]) -> Iterable[Any]:
        found = list(entries)
        self.places += [(container, key, x) for key, x in found if x is None or _are_state(x)]
        return [x for _, x in found]


def is_state(tensor: Tensor) -> bool:
    """Whether a tensor that no module owns is one that a step may have as its state: no data, no result of a graph."""
    plain = tensor.is_leaf and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_inference())
    return plain and tensor.nbytes <= LARGEST_BYTES


def _are_tensors(content: Any) -> bool:
    """Whether `content` is a tensor or several: a tuple, as of an LSTM, a list or a dict, as of one for each layer."""
    found = _several(content)
    return 0 < len(found) <= LARGEST and all(isinstance(tensor, Tensor) for tensor in found)


def _are_state(content: Any) -> bool:
    return _are_tensors(content) and all(map(is_state, _several(content)))


def has_graph(content: Any) -> bool:
    """Whether `content` is, or holds as `_are_tensors` means it, a tensor with a graph."""
    return _are_tensors(content) and any(tensor.grad_fn is not None for tensor in _several(content))


def _several(content: Any) -> Collection[Any]:
    if type(content) is dict:
        return content.values()
    return content if type(content) in (tuple, list) else (content,)


def _has_state(kind: type) -> bool:
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def referred_to(function: types.FunctionType) -> Iterator[Any]:
    """What a function's code can find by name: globals, closure, defaults. Torch's own functions have no state."""
    if (function.__module__ or "").partition(".")[0] == "torch":
        return
    for _, _, content in variables(function):
        yield content
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield getattr(function, "__wrapped__", None)


class State:
    """The `state_dict` of a scheduler or gradient scaler; given back only where it has changed since."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._before = _copy(owner.state_dict())
        self._stages = scaler_stages(owner) if isinstance(owner, GradScaler) else None

    @property
    def scales(self) -> bool:
        """Whether it is that of a gradient scaler, and one that is in use."""
        return self._stages is not None and bool(self._before)

    def restore(self) -> None:
        now = self._owner.state_dict()
        if not _same(self._before, now):
            self._owner.load_state_dict(_like(self._before, now))
        if self._stages is not None:  # a step that failed in between may have left its mark
            set_scaler_stages(self._owner, self._stages)

    def calm(self) -> None:
        """Have a scaler scale by 1: where gradients overflow it leaves out the optimizer's step, as it often does with
        its first scales, and the memory of that would go unseen.
        """
        if self.scales:
            self._owner.load_state_dict({**_like(self._before, {}), "scale": 1.0})


def put_back(container: Any, key: Any, content: Any) -> None:
    """Bind `content` again where it was found, if something else is there. A list that became shorter stays so.

    Where nothing was, nothing is bound again only in place of tensors: a state that the first step begins.
    """
    if isinstance(container, list) and key >= len(container):
        return
    now = content_now(container, key)
    if now is content or (content is None and not _are_tensors(now)):
        return
    if isinstance(container, types.CellType):
        container.cell_contents = content
    else:
        container[key] = content


def is_generator(thing: Any) -> bool:
    """Whether it draws random numbers from a state; the system's have none."""
    return isinstance(thing, _GENERATORS) and not isinstance(thing, random.SystemRandom)


def content_now(container: Any, key: Any) -> Any:
    """What is there now, in a dict, list or cell; None for nothing."""
    if isinstance(container, list):
        return container[key]
    if isinstance(container, dict):
        return container.get(key)
    try:
        return container.cell_contents
    except ValueError:  # empty
        return None


def states(owners: Iterable[Any]) -> list[State]:
    """Of those whose state can be asked for now."""
    found = []
    for owner in owners:
        try:
            found.append(State(owner))
        except Exception:  # somebody else's code, which nobody here asked for: it may need what is not there yet
            continue
    return found


def _copy(state: Any) -> Any:
    if isinstance(state, Tensor):
        return set_aside(state.detach().to("cpu", copy=True))
    if isinstance(state, dict):
        return {key: _copy(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_copy, state))
    return state


def _like(saved: Any, now: Any) -> Any:
    """`saved` once more, with its tensors on the devices that they are on in `now`."""
    if isinstance(saved, Tensor):
        return saved.to(now.device if isinstance(now, Tensor) else "cpu", copy=True)
    if isinstance(saved, dict):
        return {key: _like(value, now.get(key) if isinstance(now, dict) else None) for key, value in saved.items()}
    if type(saved) in (list, tuple):
        there = now if isinstance(now, list | tuple) else ()
        return type(saved)(_like(value, of) for value, of in itertools.zip_longest(saved, there[: len(saved)]))
    return saved


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other.cpu())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if one is other:
        return True
    try:
        return bool(one == other)
    except Exception:  # no truth in it, as of arrays: then it is given back
        return False
