"""Plain attributes of modules: what a call found there, although it is bound anew before backward.

Which of two kinds of data a batch is of, how hot a softmax is, what a block is conditioned on: all this is written on
modules before a call, and is another thing at the next call, or gone. Taken are numbers, strings and the like, lists,
tuples, sets and dicts of them, and tensors that the call itself leaves where they are. Whatever else is on a module, or
is reached through it, a call must find as it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from enum import Enum
from typing import Any, Final

from torch import Tensor, nn

from lowtide._torch import CALL
from lowtide.remat.arguments import ATOMS
from lowtide.remat.values import changed_in_place

LARGEST: Final = 100
"""Lists and the like with more entries are data."""

_TORCHS: Final = frozenset(vars(nn.Module())) | {CALL}

Table = dict[str, Any]
"""A module's `__dict__`."""


class Attributes:
    """What plain attributes of `modules` were when a call began."""

    __slots__ = ("_plain", "_tensors", "_there")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._plain: list[tuple[Table, str, Any, Any]] = []
        """What was there, and its contents."""
        self._there: list[tuple[Table, str, weakref.ref[Tensor], int]] = []
        self._tensors: list[tuple[Table, str, Tensor, int]] = []
        for table in map(vars, modules):
            for name in table.keys() - _TORCHS:
                found = table[name]
                if isinstance(found, Tensor):
                    if not found.is_inference():  # of those no version is counted
                        self._there.append((table, name, weakref.ref(found), found._version))
                elif _is_plain(found):
                    self._plain.append((table, name, found, _copy(found)))

    def learn(self) -> None:
        """The call is over. A tensor that it bound anew, or wrote to, is its result: to hold that would leak."""
        for table, name, reference, version in self._there:
            tensor = table.get(name)
            if isinstance(tensor, Tensor) and tensor is reference() and tensor._version == version:
                self._tensors.append((table, name, tensor, version))
        self._there.clear()

    def put_back(self) -> None:
        """Let the modules have them again. Raises RuntimeError for a tensor that was changed in place."""
        copies: dict[int, Any] = {}  # what two modules share stays one
        for table, name, found, content in self._plain:
            if table.get(name) is not found:
                table[name] = found
            if found != content:
                table[name] = copies.setdefault(id(found), _copy(content))
        for table, name, tensor, version in self._tensors:
            if tensor._version != version:
                raise RuntimeError(changed_in_place(tensor, version))
            table[name] = tensor


def _is_plain(found: Any) -> bool:
    if type(found) in (list, tuple, set, frozenset, dict):
        inside = (*found, *found.values()) if type(found) is dict else found
        return len(found) <= LARGEST and all(type(item) in ATOMS for item in inside)
    return type(found) in ATOMS or isinstance(found, Enum)


def _copy(found: Any) -> Any:
    return found.copy() if type(found) in (list, set, dict) else found
