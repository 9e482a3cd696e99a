"""Restore every Python object that a step can reach: attributes, dictionaries, lists, closures.

A counter on a module, a schedule kept in a dict, Accelerate's count of micro-batches: a trial run of the step advances
them, and training would then start from a different state. So every place that can be reached from the model, the step
and the optimizers is recorded with its content, one level of references at a time, and later holds the same objects
again. That restores numbers and strings too, and lists and dicts keep their identity. Only arrays and tensors have to
be copied.

The walk leaves out modules, types and functions of libraries, the objects that `observed_changes.py` leaves alone, and
containers that are data by their size. It ends after `MOST` objects.
"""

from __future__ import annotations

import array
import contextvars
import ctypes
import decimal
import functools
import gc
import mmap
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lowtide._torch.compiled_code import STATIC_INPUT
from lowtide._torch.fake_modes import is_fake
from lowtide._torch.modules import CALL
from lowtide._torch.tensors import HOOK_TABLES, is_leaf_tensor, is_plain
from lowtide.state.bindings import (
    Bindings,
    Cell,
    ClassAttributes,
    ContextValue,
    Entries,
    Items,
    Missing,
    Slots,
    Variables,
    WeakContent,
    kind_of,
)
from lowtide.state.introspection import find_names, is_opaque, is_user_code, variables
from lowtide.state.observed_changes import CACHE, WatchedObject, is_excluded
from lowtide.state.process_settings import SETTERS, make_decimal_restorer, make_settings_restorer
from lowtide.state.reachable_state import (
    BUFFERS,
    LEAVES,
    ReachableState,
    is_generator,
    is_state,
    is_torch_function,
    list_objects,
)
from lowtide.utils.object_slots import list_slots

COPIED_BYTES = 2**26
"""Largest number of bytes copied in all: arrays, tensors that no module owns, and references."""

LARGEST = 10_000
"""Largest number of entries of a container that is searched. Larger ones are data, not state: they are only restored.
"""
LARGEST_HELD = 1_000_000
"""Largest number of entries of a container that is restored."""

MOST = 200_000
"""Largest number of objects that the walk visits."""

_TABLES: Final = frozenset(name for name, table in vars(nn.Module()).items() if isinstance(table, dict))
"""Names of a module's own tables: parameters, buffers, modules, hooks."""
_WALKED: Final = ("torch.nn.", "torch.optim.", "torch.amp.", "torch.cuda.amp.", "torch.distributions.")
"""Packages of torch whose objects have state."""
_WRAPPERS: Final = ("torch.nn.parallel.", "torch.distributed.", "torch._")
"""Packages of wrapper modules that have counters outside Python objects, too."""


class ReachableObjects(ReachableState):
    """Snapshot of the objects that `roots` reach, kept until it is restored and closed."""

    largest = LARGEST
    weakly = True
    """True if contents with a graph are held by weak reference only."""

    def __init__(self, *roots: Any) -> None:
        self._places: list[Bindings] = []
        self._empty: list[Any] = []
        """Tables of modules without entries."""
        self._other_restores: list[tuple[Any, Callable[[], object]]] = []
        """Functions that put back an object's own content, each with the object."""
        self._empty_caches: list[Any] = []
        """Functions with a cache (`functools.lru_cache`) that was empty."""
        self._watched: list[WatchedObject] = []
        self._optimizer_attributes: set[int] = set()
        """Ids of optimizers' attributes, which levers may leave out."""
        self._bound: set[tuple[int, str]] = set()
        """Module-level variables that the walk has visited."""
        self._remaining_bytes = COPIED_BYTES
        self._is_complete, self._is_late, self._keeps_settings = True, False, False
        self.reached_optimizers: list[Optimizer] = []
        super().__init__(*roots)

    def reserve_bytes(self, n_bytes: int) -> bool:
        """Reserve `n_bytes` of the limit COPIED_BYTES for a copy; return False, and reserve nothing, if fewer bytes are
        left.
        """
        if n_bytes > self._remaining_bytes:
            return False
        self._remaining_bytes -= n_bytes
        return True

    def visit_late(self, *roots: Any) -> None:
        """Walk from `roots` after the step has begun. Gradients found there are the step's own, and are not
        restored.
        """
        self._is_late = True
        try:
            self.visit(*roots)
        finally:
            self._is_late = False

    def watch(self, obj: Any) -> None:
        """Let `changes` report later changes of `obj`, which is not restored."""
        self._watched.append(WatchedObject(obj))

    def restore(self) -> None:
        """Restore all objects, even if restoring one of them fails."""
        error: BaseException | None = None
        restores: list[Callable[[], object]] = [places.restore for places in reversed(self._places)]
        restores += [functools.partial(kind_of(table).clear, table) for table in self._empty if table]
        for restore in (*restores, *(restore for _, restore in reversed(self._other_restores))):
            try:
                restore()
            except BaseException as raised:  # raise the first error after everything else has been restored
                error = error or raised
        if error is not None:
            raise error

    def empty_caches(self) -> None:
        """Empty the function caches that were empty at the beginning, so that the next step draws the random numbers
        that fill them.

        Between rehearsed steps the caches stay filled, because only then do the steps do the same work.
        """
        for cache in self._empty_caches:
            cache.cache_clear()

    def close(self) -> None:
        """Release all references."""
        for collection in (self._places, self._empty, self._other_restores, self._watched, self.modules, self.tensors):
            collection.clear()
        self._empty_caches.clear()
        for more in (
            self.stateful,
            self.generators,
            self.reached_optimizers,
            self._seen,
            self._bound,
            self._optimizer_attributes,
        ):
            more.clear()

    def release_unreached(self, *roots: Any) -> None:
        """Drop this walk's references to objects that can no longer be reached from `roots`.

        A later restore leaves these objects, and references to them, as they are.
        """
        walk = type(self)()
        walk.visit(*roots)
        unreached = self._seen.keys() - walk._seen.keys()
        walk.close()
        self._places = [
            places
            for places in self._places
            if id(places.container) not in unreached and not any(id(content) in unreached for content in places.held)
        ]
        self._other_restores = [pair for pair in self._other_restores if id(pair[0]) not in unreached]
        self._watched = [watched for watched in self._watched if id(watched.obj) not in unreached]
        for objects in (self._empty, self.modules, self.tensors, self.stateful):
            _remove(objects, unreached)
        for others in (self.generators, self.reached_optimizers):
            _remove(others, unreached)
        self._named.forget(unreached)
        for key in unreached:
            del self._seen[key]

    def counts(self) -> dict[str, str]:
        """Return the changed whole numbers and strings, as text, by object number and name, such as "3 epoch"."""
        return {
            f"{number} {place}": repr(content)
            for number, places in enumerate(self._places)
            if id(places) not in self._optimizer_attributes
            for place, content in places.counts()
        }

    def changes(self) -> tuple[str, ...]:
        """Describe changes of watched objects, which are not restored: `Stream.position` went from 0 to 9."""
        descriptions = [
            f"`{self._find_name(watched.obj, name)}` {change}"
            for watched in self._watched
            for name, change in watched.changes()
        ]
        if not self._is_complete:
            descriptions.append(f"the step reaches more than {MOST:,} objects: what the others hold is not known")
        return tuple(dict.fromkeys(descriptions))

    def _find_name(self, obj: Any, within: str) -> str:
        """Return a name for something within `obj`: the name of the place that holds `obj`, followed by `within`, as in
        `Trainer.stream.position`.
        """
        if within and hasattr(obj, "__dict__"):
            return f"{type(obj).__name__}{within}"
        if within:
            return f"{getattr(obj, '__name__', type(obj).__name__)}{within}"
        for _ in range(3):
            holder = next((p for p in self._places if p.find_name(obj) is not None), None)
            if holder is None:
                break
            within = f"{holder.find_name(obj)}{within}"
            if not isinstance(holder, Items | Entries) or not within.startswith("["):
                return within
            obj = holder.container
        return f"{type(obj).__name__}{within}"

    # --- the walk

    def _is_of_interest(self, obj: Any) -> bool:
        if is_lowtide_module(type(obj).__module__):
            return False
        if len(self._seen) >= MOST and not isinstance(obj, nn.Module):
            self._is_complete = False
            return False
        return True

    def _record(self, places: Bindings) -> Iterable[Any]:
        """Record `places`, to restore them; return their contents that may lead to further objects."""
        self._places.append(places)
        return [x for x in places.held if type(x) not in _WORDS and x is not Missing]

    def _tensor(self, tensor: Tensor) -> Iterable[Any]:
        if is_leaf_tensor(tensor) and not tensor.is_inference():
            if not self._is_late:
                self._other_restores.append((tensor, _make_gradient_restorer(tensor)))
            if is_state(tensor) or (tensor.is_sparse and not tensor.is_meta):
                self.tensors.append(tensor)
            if (is_plain(tensor) or tensor.is_sparse or is_user_code(type(tensor))) and not is_fake(tensor):
                owner, mark = type(tensor).__name__, (STATIC_INPUT,)
                own = Entries(vars(tensor), weakly=self.weakly, owner=owner, excluded=mark)
                return (*self._record(own), *self._hooks(tensor))
        return ()

    def _hooks(self, tensor: Tensor) -> Iterable[Any]:
        """Record and return the hooks on the gradient of `tensor`. Hooks that Lowtide adds later are not removed."""
        hooks = {name: dict(getattr(tensor, name) or {}) for name in HOOK_TABLES}

        def restore() -> None:
            for name, before in hooks.items():
                if (now := getattr(tensor, name)) is None:
                    continue
                ours = {
                    key: hook for key, hook in now.items() if is_lowtide_module(getattr(hook, "__module__", "") or "")
                }
                if now.keys() != (wanted := {**before, **ours}).keys():
                    now.clear()
                    now.update(wanted)

        self._other_restores.append((tensor, restore))
        return [hook for table in hooks.values() for hook in table.values()]

    def _container(self, container: Any) -> Iterable[Any]:
        kind = kind_of(container)
        own = () if type(container) is kind else self._object(container)
        n_entries = kind.__len__(container)
        if n_entries > max(LARGEST_HELD, self.largest) or not self.reserve_bytes(8 * n_entries):
            self.watch(container)
            return own
        inside = self._record(
            Entries(container, weakly=self.weakly) if issubclass(kind, dict) else Items(container, weakly=self.weakly)
        )
        if n_entries > self.largest:
            inside = [x for x in inside if isinstance(x, nn.Module)]
        return (*inside, *own)

    def _function(self, function: types.FunctionType) -> Iterable[Any]:
        if is_lowtide_module(function.__module__ or ""):
            return ()
        own = (function.__defaults__, function.__kwdefaults__, getattr(function, "__wrapped__", None))
        inside = [*own, *self._cells(function)]
        if is_user_code(function):
            if not self._keeps_settings and not SETTERS.isdisjoint(find_names(function.__code__)):
                self._keeps_settings = True
                self._other_restores.append((function, make_settings_restorer()))
            return (*inside, vars(function), *self._variables(function), *self._named.add_code(function))
        return inside if is_torch_function(function) else (*inside, *self._variables(function, only=_is_data))

    def _cells(self, function: types.FunctionType) -> Iterator[Any]:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                yield from self._record(Cell(cell, name, weakly=self.weakly))

    def _variables(self, function: types.FunctionType, only: Callable[[Any], bool] | None = None) -> Iterator[Any]:
        """Record module-level variables that the function names, bound or not; yield their contents.

        With `only`, just variables whose content it accepts are recorded.
        """
        tables = {id(function.__globals__): function.__globals__}
        names: dict[int, dict[str, None]] = {id(function.__globals__): {}}
        for place, name, content in variables(function):
            if type(place) is dict and (only is None or only(content)):
                tables[id(place)] = place
                names.setdefault(id(place), {})[name] = None
        if only is None:
            unbound = set(find_names(function.__code__)) - function.__globals__.keys()
            names[id(function.__globals__)].update(dict.fromkeys(sorted(unbound)))
        for key, table in tables.items():
            new = [name for name in names[key] if (key, name) not in self._bound]
            self._bound.update((key, name) for name in new)
            if new:
                yield from self._record(Variables(table, new, weakly=self.weakly))

    def _class(self, kind: type) -> Iterable[Any]:
        if not is_user_code(kind):
            return ()
        self._record(ClassAttributes(kind, weakly=self.weakly))
        return (*kind.__mro__[1:], *self._named.add_object(kind))

    def _context_variable(self, variable: contextvars.ContextVar[Any]) -> Iterable[Any]:
        value = ContextValue(variable, weakly=self.weakly)
        if value.held == [Missing]:
            self.watch(variable)
        return self._record(value)

    def _object(self, obj: Any) -> Iterable[Any]:
        if isinstance(obj, np.ndarray):
            return self._array(obj)
        if isinstance(obj, BUFFERS):
            return self._buffer(obj)
        if isinstance(obj, BaseException):
            self._other_restores.append((obj, functools.partial(setattr, obj, "args", obj.args)))
            return (*obj.args, *self._attributes(obj))
        if isinstance(obj, decimal.Context):
            self._other_restores.append((obj, make_decimal_restorer(obj)))
            return ()
        if isinstance(obj, CACHE):
            return self._cache(obj)
        if is_generator(obj):
            self.generators.append(obj)
        elif isinstance(obj, np.random.SeedSequence):
            self.watch(obj)
        elif self._is_excluded(obj):
            self.watch(obj)
            return filter(self._is_excluded, [*_attributes(obj), *_find_referents(obj)])
        if isinstance(obj, np.random.Generator):
            return (obj.bit_generator.seed_seq,)
        if is_opaque(type(obj)) or not self._is_walked(obj):
            return ()
        if isinstance(obj, nn.Module):
            return self._module(obj)
        return self._attributes(obj)

    def _classify(self, obj: Any) -> None:
        if isinstance(obj, Optimizer):
            self.reached_optimizers.append(obj)
        else:
            super()._classify(obj)

    def _is_excluded(self, obj: Any) -> bool:
        return is_excluded(obj)

    def _is_walked(self, obj: Any) -> bool:
        defined_in = f"{type(obj).__module__}."
        return isinstance(obj, nn.Module) or not defined_in.startswith("torch.") or defined_in.startswith(_WALKED)

    def _attributes(self, obj: Any, excluded: Collection[str] = ()) -> Iterable[Any]:
        """Record the slots and attributes of an object; return their contents."""
        self._classify(obj)
        contents: list[Any] = [type(obj), vars(type(obj)).get("__call__")]
        if list_slots(obj):
            contents += self._record(Slots(obj, weakly=self.weakly))
        attributes = getattr(obj, "__dict__", None)
        if type(attributes) is dict and id(attributes) not in self._seen:  # several objects may share one `__dict__`
            self._seen[id(attributes)] = attributes
            own = Entries(attributes, weakly=self.weakly, owner=type(obj).__name__, excluded=excluded)
            contents += self._record(own)
            self._optimizer_attributes |= {id(own)} if f"{type(obj).__module__}.".startswith("torch.optim.") else set()
        return contents

    def _module(self, module: nn.Module) -> Iterable[Any]:
        """Record a module, except for uninitialised or sharded parameters; return the objects that it holds."""
        if isinstance(module, torch.jit.ScriptModule):  # the tables of a scripted module are no dicts
            self._classify(module)
            return [*module.children(), *module.parameters()]
        tensors = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        if type(module).__module__.startswith(_WRAPPERS) or any(t.is_meta or is_lazy(t) for t in tensors):
            self._classify(module)
            self._record(Variables(vars(module), ["training"]))
            return [*module._modules.values(), *tensors]
        own = vars(module)
        tables = {name: own[name] for name in _TABLES if name in own}
        self._empty += [table for table in tables.values() if not table]
        skipped = {id(table) for table in tables.values() if not table}
        if not all(map(is_plain, tensors)):
            skipped.add(id(own["_parameters"]))
        return (*(x for x in self._attributes(module, (CALL,)) if id(x) not in skipped), *tensors)

    def _array(self, values: np.ndarray[Any, Any]) -> Iterable[Any]:
        now = np.asarray(values)  # bypass methods of a subclass
        if not now.flags.writeable:
            return ()
        if not self.reserve_bytes(now.nbytes):
            self.watch(values)
            return ()
        before = now.copy()

        def restore() -> None:
            if now.shape != before.shape:
                now.resize(before.shape, refcheck=False)
            if now.tobytes() != before.tobytes():  # compares NaN by bits, and arrays of objects by address
                now[...] = before

        self._other_restores.append((values, restore))
        return list_objects(before, self.largest) if before.dtype == object else ()

    def _buffer(self, buffer: Any) -> Iterable[Any]:
        try:
            with memoryview(buffer) as view:
                n_bytes, is_written = view.nbytes, not view.readonly
        except ValueError:  # a memory map that is closed
            return ()
        if is_written and self.reserve_bytes(n_bytes):
            before = bytes(buffer)

            def restore() -> None:
                if bytes(buffer) == before:
                    return
                if isinstance(buffer, mmap.mmap):
                    buffer[: len(before)] = before
                elif isinstance(buffer, array.array):
                    buffer[:] = array.array(buffer.typecode, before)
                elif isinstance(buffer, bytearray):
                    buffer[:] = before
                else:
                    ctypes.memmove(ctypes.addressof(buffer), before, len(before))

            self._other_restores.append((buffer, restore))
        return ()

    def _cache(self, cache: Any) -> Iterable[Any]:
        if is_user_code(cache.__wrapped__):
            if cache.cache_info().currsize:
                self.watch(cache)
            else:
                self._empty_caches.append(cache)
        return (cache.__wrapped__,)


def observe_changes(*roots: Any) -> Callable[[], tuple[str, ...]]:
    """Return a function that describes later changes of those objects behind `roots` that can't be restored."""
    return ReachableObjects(*roots).changes


def _remove(objects: list[Any], ids: Collection[int]) -> None:
    objects[:] = [obj for obj in objects if id(obj) not in ids]


_WORDS: Final = (str, int, float, bool, bytes, complex, types.NoneType, types.ModuleType, WeakContent)


def is_lowtide_module(module_name: str) -> bool:
    """Return True for the name of a Lowtide module, except for `lowtide.cli.demo`, whose code is a training step."""
    return module_name.partition(".")[0] == "lowtide" and not module_name.startswith("lowtide.cli.demo")


def _is_data(content: Any) -> bool:
    """Return True if `content`, a variable's value in a library module, is data such as a number, list or tensor."""
    words = isinstance(content, LEAVES) and not isinstance(content, types.ModuleType | types.BuiltinFunctionType)
    return words or kind_of(content) is not None or isinstance(content, Tensor | nn.Module) or is_generator(content)


def _attributes(obj: Any) -> Iterable[Any]:
    attributes = getattr(obj, "__dict__", None)
    return attributes.values() if type(attributes) is dict else ()


def _find_referents(iterator: Any) -> Iterable[Any]:
    """Return the objects that a built-in iterator refers to, such as iterators or data."""
    return gc.get_referents(iterator) if type(iterator).__module__ in ("builtins", "itertools", "collections") else ()


def _make_gradient_restorer(tensor: Tensor) -> Callable[[], None]:
    gradient, requires = tensor.grad, tensor.requires_grad
    if gradient is not None and is_fake(gradient):  # found after the step began: the gradient is the rehearsal's
        gradient = None

    def restore() -> None:
        if tensor.grad is not gradient:
            tensor.grad = gradient
        if tensor.requires_grad != requires:
            tensor.requires_grad_(requires)

    return restore
