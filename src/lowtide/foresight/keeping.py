"""Everything in Python that a step can reach, put back as it was: attributes, dictionaries, lists, closures.

A step of fake tensors writes to no real one, but leaves fake ones behind: gradients, optimizer state, a gradient
scaler's scale, a list of losses. And it does to all else what a step does: it draws from generators of random numbers,
and writes to arrays of NumPy. So every object is noted that can be reached from the model, the step, the batch and the
optimizers that step, one level of references at a time, and afterwards each holds what it held.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import types
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide._code import Named, is_opaque, is_users, origin, variables
from lowtide._slots import slots_of
from lowtide._standins import of_this_thread
from lowtide._torch import is_fake
from lowtide.rehearsal.containers import Contents, kind_of
from lowtide.rehearsal.reached import is_generator
from lowtide.rehearsal.unchanged import RandomState, state_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

LARGEST = 100_000
"""Containers with more entries are data, not state: they are left alone."""

LARGEST_ARRAY = 2**24
"""Arrays of NumPy with more bytes are data, too,"""

LARGEST_ARRAYS = 2**28
"""and so are all that are found when those before them have so many together."""

_LEAVES = (str, bytes, int, float, complex, bool, type(None), types.ModuleType, types.BuiltinFunctionType)
_DEPTH = 6
"""Its own dict, its list of entries, and what is in an entry."""
_CACHE = type(functools.lru_cache(int))


class Kept:
    """While the `with` block runs anything may happen to what `roots` reach; at its end it is as it was.

    Contents of real tensors are not copied: see that nothing writes to them. Random numbers are put back as well, those
    of generators that are reached included.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._restore: list[Callable[[], object]] = []
        self._seen: dict[int, Any] = {}
        self._optimizers: dict[int, Optimizer] = {}
        self._named = Named("forward")  # `model(x)` leads there
        self._array_bytes = LARGEST_ARRAYS

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Every optimizer that has stepped."""
        return tuple(self._optimizers.values())

    @property
    def reached(self) -> tuple[Any, ...]:
        """Every object that was found so far, from the roots on."""
        return tuple(self._seen.values())

    def __enter__(self) -> Self:
        self._random = RandomState.now()
        self.note(*self._roots)
        self._hook = register_optimizer_step_pre_hook(of_this_thread(self._stepping, self._has))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hook.remove()
        with contextlib.ExitStack() as stack:  # all of them, from the last on, whatever fails
            stack.callback(self._random.restore)
            stack.callback(self._seen.clear)
            for restore in self._restore:
                stack.callback(restore)
            self._restore.clear()

    def _has(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._seen

    def _stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers[id(optimizer)] = optimizer
        self.note(optimizer)  # if no root reaches it: it has not stepped yet

    def note(self, *roots: Any) -> None:
        """What these reach is put back to what it is now, unless it was reached before."""
        pending = deque(roots)
        while pending:
            thing = pending.popleft()
            if isinstance(thing, _LEAVES) or id(thing) in self._seen:
                continue
            self._seen[id(thing)] = thing
            pending.extend(self._remember(thing))

    def _remember(self, thing: Any) -> Iterable[Any]:
        """Note how to put one object back. Gives what it refers to."""
        if isinstance(thing, torch.Tensor):
            return self._gradient(thing)
        if (kind := kind_of(thing)) is not None:
            inside = self._container(thing)
            return inside if type(thing) is kind else (*inside, *self._object(thing))
        if isinstance(thing, tuple | frozenset):
            return thing
        if isinstance(thing, types.FunctionType):
            return self._function(thing)
        if isinstance(thing, type):
            return self._class(thing) if is_users(thing) else ()
        if isinstance(thing, _CACHE):
            return self._cache(thing)
        if isinstance(thing, types.MethodType):
            return (thing.__self__, thing.__func__)
        if isinstance(thing, functools.partial):
            return (thing.func, thing.args, thing.keywords)
        if isinstance(thing, types.CellType):
            return self._cell(thing)
        if isinstance(thing, np.ndarray):
            return self._array(thing)
        if is_generator(thing):
            self._generator(thing)
        if isinstance(thing, torch.jit.ScriptModule):  # whose parameters are in no dict
            return (*self._object(thing), *thing.parameters())
        return () if is_opaque(type(thing)) else self._object(thing)

    def _object(self, thing: Any) -> Iterable[Any]:
        slots, attributes = self._slots(thing), getattr(thing, "__dict__", None)
        if type(attributes) is not dict:
            return slots
        return (*slots, attributes, type(thing), *self._named.thing(thing))

    def _gradient(self, tensor: torch.Tensor) -> Iterable[Any]:
        if tensor.is_leaf and not tensor.is_inference():
            gradient, requires = tensor.grad, tensor.requires_grad
            if gradient is not None and is_fake(gradient):  # it was found late, when there was one of the rehearsal's
                gradient = None

            def restore() -> None:
                if tensor.grad is not gradient:
                    tensor.grad = gradient
                if tensor.requires_grad != requires:
                    tensor.requires_grad_(requires)

            self._restore.append(restore)
        return ()

    def _container(self, container: Any) -> Iterable[Any]:
        if kind_of(container).__len__(container) > LARGEST:
            return ()
        contents = Contents(container)
        self._restore.append(contents.restore)
        return contents.held

    def _class(self, kind: type) -> Iterable[Any]:
        """The attributes of a class of the user's, which code may bind anew."""
        before = dict(vars(kind))

        def restore() -> None:
            for name in vars(kind).keys() - before.keys():
                type.__delattr__(kind, name)
            for name, content in before.items():
                if vars(kind).get(name, _Empty) is not content:
                    type.__setattr__(kind, name, content)

        self._restore.append(restore)
        return self._named.thing(kind)

    def _cache(self, cache: Any) -> Iterable[Any]:
        """A function that remembers what it gave: it forgets all if there is a fake tensor among that."""
        n_misses = cache.cache_info().misses

        def restore() -> None:
            if cache.cache_info().misses != n_misses and _has_fakes(cache):
                cache.cache_clear()

        self._restore.append(restore)
        return (cache.__wrapped__,)

    def _function(self, function: types.FunctionType) -> Iterable[Any]:
        is_ours = origin(function.__code__.co_filename) == "ours"  # it has torch's tables of hooks, say
        found = [] if is_ours else [each for each in variables(function) if type(each[0]) is dict]

        def restore() -> None:
            for table, name, content in found:
                if table.get(name) is not content:
                    table[name] = content

        self._restore.append(restore)
        contents = [content for _, _, content in found]
        wrapped = getattr(function, "__wrapped__", None)
        named = self._named.code(function)
        own = (function.__defaults__, function.__kwdefaults__, wrapped, None if is_ours else vars(function))
        return (*contents, *named, *(function.__closure__ or ()), *own)

    def _cell(self, cell: types.CellType) -> Iterable[Any]:
        content = _in_cell(cell)

        def restore() -> None:
            if _in_cell(cell) is content:
                return
            if content is _Empty:
                del cell.cell_contents
            else:
                cell.cell_contents = content

        self._restore.append(restore)
        return (content,)

    def _array(self, array: np.ndarray[Any, Any]) -> Iterable[Any]:
        now = np.asarray(array)  # past methods of a class of its own
        if now.nbytes > min(LARGEST_ARRAY, self._array_bytes) or not now.flags.writeable:
            return ()
        self._array_bytes -= now.nbytes
        before = now.copy()

        def restore() -> None:
            if now.tobytes() != before.tobytes():  # NaN included; of objects that is where they are
                now[...] = before

        self._restore.append(restore)
        return before.ravel().tolist() if before.dtype == object and before.size <= LARGEST else ()

    def _generator(self, generator: Any) -> None:
        set_state, state = state_of(generator)
        self._restore.append(functools.partial(set_state, state))

    def _slots(self, thing: Any) -> Iterable[Any]:
        """What an object has in slots, frozen or not."""
        slots = slots_of(thing)
        before = [_content(slot, thing) for slot in slots]

        def restore() -> None:
            for slot, content in zip(slots, before, strict=True):
                if _content(slot, thing) is content:
                    continue
                if content is _Empty:
                    slot.__delete__(thing)
                else:
                    slot.__set__(thing, content)

        if slots:
            self._restore.append(restore)
        return before


class _Empty:
    """What a slot or a cell without content has."""


def _in_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _Empty


def _content(slot: types.MemberDescriptorType, thing: Any) -> Any:
    try:
        return slot.__get__(thing)
    except AttributeError:
        return _Empty


def _has_fakes(cache: Any) -> bool:
    """Whether one is in what a cache refers to, some objects deep; entries of a cache can't be asked for."""
    level, seen = [cache], set[int]()
    for _ in range(_DEPTH):
        level = [inside for thing in level for inside in gc.get_referents(thing) if id(inside) not in seen]
        seen.update(map(id, level))
        if any(isinstance(thing, torch.Tensor) and is_fake(thing) for thing in level):
            return True
        level = [thing for thing in level if not isinstance(thing, (*_LEAVES, type, types.FunctionType, torch.Tensor))]
    return False
