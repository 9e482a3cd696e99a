"""Undo the appends of a replayed call to external lists, such as a list of losses."""

from __future__ import annotations

import gc
from collections import deque
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lowtide._torch.autograd_graph import producer
from lowtide._torch.nodes import sequence_number
from lowtide.utils.live_objects import live_objects

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEPTH = 3
"""Levels of nested tuples that are searched for a list."""


def take_back(first: int, stop: int) -> None:
    """Remove tensors whose nodes have sequence numbers from `first` up to `stop` from all lists. Scans all objects.

    A tensor that replaced another one, as in a dict, stays: the replaced value is unknown.
    """
    given = [tensor for tensor in live_objects(Tensor) if _is_of(tensor, first, stop)]
    ours = {id(given)}
    for index in range(len(given)):
        _take_out(given[index], ours, _DEPTH)


def _is_of(tensor: Tensor, first: int, stop: int) -> bool:
    node = producer(tensor)
    return node is not None and first <= sequence_number(node) < stop


def _take_out(thing: Any, ours: set[int], depth: int) -> None:
    for holder in _holders(thing, ours):
        if isinstance(holder, list | deque):
            for place in reversed(range(len(holder))):
                if holder[place] is thing:
                    del holder[place]
        elif type(holder) is tuple and depth:
            _take_out(holder, ours, depth - 1)


def _holders(thing: Any, ours: set[int]) -> Iterator[Any]:
    holders = gc.get_referrers(thing)
    yield from (holder for holder in holders if id(holder) not in ours and holder is not holders)
