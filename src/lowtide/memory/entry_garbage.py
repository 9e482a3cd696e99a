"""Tell if a recording may begin without a collection of garbage, which takes 0.1 s once torch is imported."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor

from lowtide._torch.tensors import get_storage_number, is_leaf_tensor
from lowtide.memory import entry_storages as entry
from lowtide.memory.frame_locals import local_variables
from lowtide.memory.frame_variables import find_held_memory, is_searched

_MOST_OBJECTS = 20_000
_NOT_ENTERED = (ModuleType, type, CodeType, FrameType, str, bytes)


def may_hold_memory(frame: FrameType, others: Iterable[object]) -> bool:
    """Return True if a storage in CPU memory may be garbage that waits for a collection.

    A storage is no garbage if only variables of `frame`, a running function, hold it, or if it is reachable from
    `others`, from the function's other variables (models and other objects, closures) or from the variables of its
    module. Return True also if more than 20,000 objects would have to be searched.
    """
    doubtful = {get_storage_number(storage) for storage in entry.collect_storages(entry.find_existing_tensors())}
    doubtful.difference_update(get_storage_number(storage) for storage, _ in find_held_memory(frame).storages)
    if doubtful:
        roots = [*others, *_find_other_variables(frame)]
        for found in _find_reachable_tensors(roots):
            doubtful.difference_update(get_storage_number(storage) for storage in entry.collect_storages(found))
            if not doubtful:
                break
    return bool(doubtful)


def _find_other_variables(frame: FrameType) -> list[object]:
    """Return the values of the variables that `find_held_memory` does not search, and of the module's variables."""
    closure = frame.f_code.co_freevars
    with local_variables(frame) as variables:
        is_module = variables is frame.f_globals
        roots = [value for name, value in variables.items() if name in closure or not is_searched(value)]
    return roots if is_module else [*roots, *frame.f_globals.values()]


def _find_reachable_tensors(roots: list[Any]) -> Iterator[list[Tensor]]:
    """Yield lists of tensors reachable from `roots`, nearest first.

    After each list comes a list of the gradients of its leaf tensors. The final list holds the tensors saved in the
    autograd graphs of all tensors found.
    """
    seen: dict[int, Any] = {}
    tensors: list[Tensor] = []
    frontier = roots
    while frontier and len(seen) < _MOST_OBJECTS:
        new = {id(obj): obj for obj in frontier if id(obj) not in seen and gc.is_tracked(obj)}
        seen |= new
        entered = [obj for obj in new.values() if not isinstance(obj, _NOT_ENTERED)]
        found = [obj for obj in entered if isinstance(obj, Tensor)]
        tensors += found
        yield found
        yield [leaf.grad for leaf in found if is_leaf_tensor(leaf) and leaf.grad is not None]
        # the globals of a function lead to whole modules
        inside = ((obj.__closure__, obj.__defaults__) if isinstance(obj, FunctionType) else (obj,) for obj in entered)
        frontier = gc.get_referents(*(obj for group in inside for obj in group))
    yield list(entry.find_saved_behind(tensors))
