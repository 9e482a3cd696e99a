"""What a call that was run again gave to something outside of it, such as a list of losses, is taken back."""

from __future__ import annotations

import gc
from collections import deque
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lowtide._torch.autograd_graph import producer
from lowtide._torch.nodes import sequence_number

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEPTH = 3
"""Tuples in tuples in a list."""


def take_back(first: int, stop: int) -> None:
    """Take the tensors whose nodes have numbers from `first` to `stop` out of all lists. Needs a look at all objects.

    Where one was written over another, as in a dict, nobody knows what was there: that stays as it is.
    """
    given = [thing for thing in gc.get_objects() if _is_of(thing, first, stop)]
    ours = {id(given)}
    for index in range(len(given)):
        _take_out(given[index], ours, _DEPTH)


def _is_of(thing: Any, first: int, stop: int) -> bool:
    if not issubclass(type(thing), Tensor):
        return False
    node = producer(thing)
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
