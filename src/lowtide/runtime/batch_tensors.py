"""Tensors of a batch, or of a step's result."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch.pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from torch import Tensor


def collect_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in a batch or a step's result, also those inside nested lists, tuples, mappings and
    objects.
    """
    tensors: list[Tensor] = []
    visited: dict[int, Any] = {}
    pending = tree_leaves(tree)[::-1]
    while pending:  # a recursive closure would hold its results until garbage is collected
        leaf = pending.pop()
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif id(leaf) not in visited and not isinstance(leaf, _NO_BATCH):
            visited[id(leaf)] = leaf
            inside = list(leaf.values()) if isinstance(leaf, Mapping) else [*getattr(leaf, "__dict__", {}).values()]
            pending += tree_leaves(inside)[::-1]
    return tensors


_NO_BATCH = (str, bytes, int, float, type(None), type, ModuleType, FunctionType, MethodType, torch.nn.Module)


def with_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a batch with each tensor replaced by `change(tensor)`; `tree` itself stays unchanged."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        inside = collect_tensors(leaf)
        return copy.deepcopy(leaf, {id(tensor): change(tensor) for tensor in inside}) if inside else leaf

    return tree_map(changed, tree)


def put_in_words(tensors: Iterable[Tensor]) -> str:
    """Format the tensors' shapes and dtypes: `[8, 1024] int64, [8, 1024] bool`. A nested tensor has the shape of all
    its rows joined.
    """
    whole = (t.values() if t.is_nested else t for t in tensors)
    return ", ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in whole)
