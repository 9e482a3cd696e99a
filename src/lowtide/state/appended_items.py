"""Undo what a replayed call appended to lists outside it, such as a list of losses."""

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
"""Number of levels of nested tuples that are searched for a list."""


def undo_appends(first: int, stop: int) -> None:
    """Remove from all lists and deques in the process the tensors whose autograd nodes have sequence numbers from
    `first` to below `stop`.

    All live objects are scanned. A tensor stored in a dict stays, because the value that it may have
    replaced is unknown.
    """
    appended = [tensor for tensor in live_objects(Tensor) if _was_made_between(tensor, first, stop)]
    ours = {id(appended)}
    for index in range(len(appended)):
        _remove_from_lists(appended[index], ours, _DEPTH)


def _was_made_between(tensor: Tensor, first: int, stop: int) -> bool:
    node = producer(tensor)
    return node is not None and first <= sequence_number(node) < stop


def _remove_from_lists(obj: Any, ours: set[int], depth: int) -> None:
    for holder in _holders(obj, ours):
        if isinstance(holder, list | deque):
            for place in reversed(range(len(holder))):
                if holder[place] is obj:
                    del holder[place]
        elif type(holder) is tuple and depth:
            _remove_from_lists(holder, ours, depth - 1)


def _holders(obj: Any, ours: set[int]) -> Iterator[Any]:
    holders = gc.get_referrers(obj)
    yield from (holder for holder in holders if id(holder) not in ours and holder is not holders)
