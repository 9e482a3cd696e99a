"""Restore all state that a step on fake tensors may change.

Such a step writes to no real tensor, but leaves fake ones behind: gradients, optimizer state, a gradient scaler's
scale, a list of losses. It also has a real step's side effects: it draws random numbers and writes to NumPy arrays.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide._torch.fake_modes import is_fake
from lowtide._torch.patching import this_thread_only
from lowtide.state.introspection import origin
from lowtide.state.observed_changes import is_excluded
from lowtide.state.reachable_objects import ReachableObjects
from lowtide.state.reachable_state import LEAVES, is_generator
from lowtide.state.step_snapshot import RandomState, state_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

_DEPTH = 6
"""Depth to which a cache is searched: its dict, its list of entries, and the contents of an entry."""


class FakeStepState(ReachableObjects):
    """Context manager that restores every object that can be reached from `roots`.

    Contents of real tensors are not copied; the caller ensures that no operator writes to them. Random number
    generators are restored, too. Data sets, iterators and library functions are also searched, because any of them may
    hold a fake tensor.
    """

    largest = 100_000
    weakly = False

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._optimizers: dict[int, Optimizer] = {}
        self.unrestored: tuple[str, ...] = ()
        """Changes that were not restored, in words; set after the block."""
        super().__init__()

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """All optimizers that have stepped."""
        return tuple(self._optimizers.values())

    @property
    def reached(self) -> tuple[Any, ...]:
        """All objects found so far, including the roots."""
        return tuple(self.visited)

    def __enter__(self) -> Self:
        self._random = RandomState.now()
        self.visit(*self._roots)
        self._hook = register_optimizer_step_pre_hook(this_thread_only(self._stepping, self._has))
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        try:
            self.restore()
            self.unrestored = self.changes()
        finally:
            self._random.restore()
            self.close()

    def release_unreached(self, *roots: Any) -> None:
        self._roots = ()
        super().release_unreached(*roots)
        self._optimizers = {key: optimizer for key, optimizer in self._optimizers.items() if key in self._seen}

    def _has(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._seen

    def _stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers[id(optimizer)] = optimizer
        self.visit(optimizer)  # for an optimizer that no root reaches; it has not stepped yet

    # --- the walk

    def _is_of_interest(self, obj: Any) -> bool:
        return True

    def _is_excluded(self, obj: Any) -> bool:
        return False

    def _is_walked(self, obj: Any) -> bool:
        return True

    def _function(self, function: types.FunctionType) -> Iterable[Any]:
        is_ours = origin(function.__code__.co_filename) == "ours"  # its globals include torch's tables of hooks
        variables = () if is_ours else self._variables(function)
        own = (function.__defaults__, function.__kwdefaults__, None if is_ours else vars(function))
        wrapped = getattr(function, "__wrapped__", None)
        return (*variables, *self._named.add_code(function), *self._cells(function), *own, wrapped)

    def _object(self, obj: Any) -> Iterable[Any]:
        if is_generator(obj):
            set_state, state = state_of(obj)
            self._other_restores.append((obj, functools.partial(set_state, state)))
        elif is_excluded(obj):
            self.watch(obj)
        return super()._object(obj)

    def _module(self, module: torch.nn.Module) -> Iterable[Any]:
        scripted = isinstance(module, torch.jit.ScriptModule)  # whose parameters are in no dict
        return (*self._attributes(module), *(module.parameters() if scripted else ()))

    def _cache(self, cache: Any) -> Iterable[Any]:
        """Arrange that `restore` clears a function's cache if the cache holds a fake tensor by then."""
        n_misses = cache.cache_info().misses

        def restore() -> None:
            if cache.cache_info().misses != n_misses and _has_fakes(cache):
                cache.cache_clear()

        self._other_restores.append((cache, restore))
        return super()._cache(cache)


def _has_fakes(cache: Any) -> bool:
    """Return True if a function's cache refers to a fake tensor, through at most _DEPTH references.

    The references are followed by `gc.get_referents`, because the entries of a cache can't be listed.
    """
    level, visited = [cache], set[int]()
    for _ in range(_DEPTH):
        level = [inside for obj in level for inside in gc.get_referents(obj) if id(inside) not in visited]
        visited.update(map(id, level))
        if any(isinstance(obj, torch.Tensor) and is_fake(obj) for obj in level):
            return True
        level = [obj for obj in level if not isinstance(obj, (*LEAVES, type, types.FunctionType, torch.Tensor))]
    return False
