"""Find the memory that deleting a function's variables would free: storages that nothing else refers to.

Python objects are judged by their reference counts: an object with a reference from outside the variables is shared,
together with all that it refers to. Autograd graphs are walked from every tensor that Python refers to, so that a
graph belongs to a variable only if no other tensor leads to it. Nothing is recomputed and no hook runs.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import is_dataclass
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor, UntypedStorage, nn
from torch.autograd.function import BackwardCFunction
from torch.optim import Optimizer

from lowtide._torch.autograd_graph import find_nodes_behind, producer
from lowtide._torch.nodes import raw_saved
from lowtide._torch.tensors import get_storage_id, held_by_python, is_leaf_tensor
from lowtide.memory import entry_storages as entry
from lowtide.memory.frame_locals import local_variables

if TYPE_CHECKING:
    from torch.autograd.graph import Node

_CONTAINERS = (Tensor, list, tuple, dict, set, frozenset, deque)
_NOT_ENTERED = (nn.Module, Optimizer, ModuleType, type, FunctionType, MethodType, FrameType, str, bytes)
_MOST_OBJECTS = 100_000
_OTHERS = 1  # the bit of all holders other than the variables


class Held:
    """Storages that a function's variables hold at one moment. Drop this object before user code continues, because it
    keeps the storages alive.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        """The variables bound to tensors, or to containers that tensors were found in."""
        self.tensors: dict[str, list[Tensor]] = {}
        """The tensors that each variable leads to without a graph in between."""
        self.storages: list[tuple[UntypedStorage, frozenset[str]]] = []
        """Storages that only variables hold, each with all its variables: deleting these together frees the storage."""


def find_held_memory(frame: FrameType) -> Held:
    """Return the memory of torch's CPU allocator that the variables of `frame` hold, alone or together.

    Variables are searched if they are tensors, lists, tuples, dicts, sets, deques or dataclasses, and so are the
    objects inside these. Modules, optimizers, iterators and objects packed by a saved-tensor hook count as other
    holders, so that freed memory is never overstated.
    """
    held = Held()
    owners = _Owners(frame)
    marks: dict[int, int] = {}  # storage -> bits
    kept: dict[int, Tensor] = {}
    everything: list[tuple[Any, int | None]] = [
        (tensor, owners.mask_of.get(id(tensor))) for tensor in entry.find_living_tensors()
    ]
    on_context = _count_context_references(tensor for tensor, mask in everything if mask)
    roots = []
    for index in range(len(everything)):
        mask = everything[index][1]
        if mask is None:  # 1 is the reference from the tuple
            n_known = 1 + on_context.get(id(everything[index][0]), 0)
            mask = _OTHERS if held_by_python(everything[index], 0, n_known) else 0
        if mask:
            roots.append((everything[index][0], mask))
    del everything
    _spread(roots, marks, kept)
    for number, mask in marks.items():
        if not mask & _OTHERS:
            storage = next(entry.collect_storages([kept[number]]), None)
            if storage is not None:
                held.storages.append((storage, owners.find_names(mask)))
    held.tensors = owners.tensors()
    held.names = tuple(held.tensors)
    return held


def is_searched(value: object) -> bool:
    """Return True if a variable with this value is searched for tensors."""
    is_container = isinstance(value, _CONTAINERS) or (is_dataclass(value) and not isinstance(value, type))
    return is_container and not isinstance(value, _NOT_ENTERED)


class _Owners:
    """Objects reachable from variables, each with a bit mask of its holders: one bit per variable, and _OTHERS."""

    def __init__(self, frame: FrameType) -> None:
        self._objects: list[Any] = []
        self._index: dict[int, int] = {}
        self._inside: list[list[int]] = []
        self._n_known: list[int] = []
        self._first: dict[str, int] = {}
        self.mask_of: dict[int, int] = {}
        """Masks of tensors, by id."""
        with local_variables(frame) as variables:
            # the dict of the function's variables is a copy, which refers to them once more
            n_references = 1 if variables is frame.f_globals else 2
            self._gather(variables, n_references, of_others=frame.f_code.co_freevars)
            masks = self._masks()
        for index, mask in enumerate(masks):
            if isinstance(self._objects[index], Tensor):
                self.mask_of[id(self._objects[index])] = mask

    def find_names(self, mask: int) -> frozenset[str]:
        return frozenset(name for bit, name in enumerate(self._first, 1) if mask >> bit & 1)

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the tensors that each variable leads to; variables that lead to none are left out."""
        reachable = {name: self._reachable([first]) for name, first in self._first.items()}
        tensors = {
            name: [self._objects[i] for i in sorted(reached) if isinstance(self._objects[i], Tensor)]
            for name, reached in reachable.items()
        }
        return {name: inside for name, inside in tensors.items() if inside}

    def _gather(self, variables: dict[str, Any], n_references: int, of_others: tuple[str, ...]) -> None:
        """Collect the objects behind `variables`, except `of_others`, which belong to enclosing functions.

        `n_references` is the number of references to each value from the frame and from `variables` itself.
        """
        for name, value in variables.items():
            if name not in of_others and is_searched(value):
                self._first[name] = self._add(value)
                self._n_known[self._first[name]] += n_references
        number = 0
        while number < len(self._objects) < _MOST_OBJECTS:
            if not isinstance(self._objects[number], Tensor):
                for obj in gc.get_referents(self._objects[number]):
                    if gc.is_tracked(obj) and not isinstance(obj, _NOT_ENTERED):
                        inside = self._add(obj)
                        self._n_known[inside] += 1
                        self._inside[number].append(inside)
            number += 1

    def _add(self, obj: Any) -> int:
        index = self._index.setdefault(id(obj), len(self._objects))
        if index == len(self._objects):
            self._objects.append(obj)
            self._inside.append([])
            self._n_known.append(0)
        return index

    def _masks(self) -> list[int]:
        masks = [0] * len(self._objects)
        shared = [index for index in range(len(self._objects)) if self._is_shared(index)]
        for bit, first in enumerate((shared, *([first] for first in self._first.values()))):
            for index in self._reachable(first):
                masks[index] |= 1 << bit
        return masks

    def _is_shared(self, index: int) -> bool:
        n_known = self._n_known[index] + 1  # one reference is from the list of objects
        if isinstance(self._objects[index], Tensor):
            return held_by_python(self._objects, index, n_known)
        return sys.getrefcount(self._objects[index]) - 1 - n_known > 0

    def _reachable(self, first: Iterable[int]) -> set[int]:
        reached = set(first)
        pending = list(reached)
        while pending:
            new = [index for index in self._inside[pending.pop()] if index not in reached]
            reached.update(new)
            pending += new
        return reached


def _spread(roots: list[tuple[Tensor, int]], marks: dict[int, int], kept: dict[int, Tensor]) -> None:
    """Add the holders' bits of each root tensor to `marks`, for its storage and for storages that its graph keeps.

    `kept` gets one tensor of each storage.
    """

    def mark(tensor: Tensor, bits: int) -> None:
        number = get_storage_id(tensor)
        if number:
            marks[number] = marks.get(number, 0) | bits
            kept.setdefault(number, tensor)

    reached: dict[Node, int] = {}
    pending: list[tuple[Node, int]] = []
    for tensor, bits in roots:
        mark(tensor, bits)
        pending += ((node, bits) for node in (producer(tensor),) if node is not None)
        gradient = _gradient(tensor)
        if gradient is not None:
            mark(gradient, bits)
            pending += ((node, bits) for node in (producer(gradient),) if node is not None)
    while pending:
        node, bits = pending.pop()
        before = reached.get(node, 0)
        if before | bits == before:
            continue
        reached[node] = before | bits
        for tensor in _find_kept_tensors(node):
            mark(tensor, bits)
        pending += ((upstream, bits) for upstream, _ in node.next_functions if upstream is not None)


def _find_kept_tensors(node: Node) -> list[Tensor]:
    kept = [saved for saved in raw_saved(node) if isinstance(saved, Tensor)]
    leaf = getattr(node, "variable", None)
    return [*kept, *_on_context(node), *([leaf] if isinstance(leaf, Tensor) else [])]


def _on_context(node: Node) -> list[Tensor]:
    """Return the tensors that a custom Function stored on its ctx as attributes."""
    ctx: Any = node
    if not isinstance(ctx, BackwardCFunction):
        return []
    return [value for value in vars(ctx).values() if isinstance(value, Tensor)]


def _count_context_references(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Count, by tensor id, the references from attributes of custom Functions' ctx in the graphs behind `tensors`."""
    counts: dict[int, int] = {}
    for node in find_nodes_behind(tensors):
        for tensor in _on_context(node):
            counts[id(tensor)] = counts.get(id(tensor), 0) + 1
    return counts


def _gradient(tensor: Tensor) -> Tensor | None:
    return tensor.grad if is_leaf_tensor(tensor) else None
