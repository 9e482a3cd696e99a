"""Attributes of modules: what a call found there, although it is bound anew or written to before backward.

Which of two kinds of data a batch is of, how hot a softmax is, what a block is conditioned on: all this is written on
modules before a call, and is another thing at the next call, or gone. Taken are numbers, strings and the like, tensors
that the call itself leaves where they are, and lists, tuples, sets and dicts of them. Of long lists and dicts, which
are logs, what came in after the call began is taken off. Whatever else is on a module, or is reached through it, a call
must find as it was.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, Final

from torch import Tensor, nn

from lowtide._torch.modules import CALL
from lowtide.runtime.call_arguments import ATOMS

LARGEST: Final = 100
"""Containers with more entries are data or logs; those inside of others have an eighth of it."""

_TORCHS: Final = frozenset(vars(nn.Module())) | {CALL}

Table = dict[str, Any]
"""A module's `__dict__`."""


class Attributes:
    """What attributes of `modules` were when a call began."""

    __slots__ = ("_long", "_plain", "_tensors", "_there")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._plain: list[tuple[Table, str, Any, Any]] = []
        """What was there, and its contents."""
        self._long: list[tuple[Table, str, Any, int]] = []
        """What was there, and how long it was."""
        self._there: list[tuple[Table, str, int, list[tuple[weakref.ref[Tensor], int]]]] = []
        """The id of what has tensors, and these with their versions: nobody here holds them while the call runs."""
        self._tensors: list[tuple[Table, str, Any, Any, list[tuple[Tensor, int]]]] = []
        for table in map(vars, modules):
            for name, found in table.items():
                if name in _TORCHS:
                    continue
                if type(found) in ATOMS:
                    self._plain.append((table, name, found, found))
                elif isinstance(found, _TAKEN):
                    self._take(table, name, found)

    def _take(self, table: Table, name: str, found: Any) -> None:
        tensors: list[Tensor] = []
        if isinstance(found, list | dict) and len(found) > LARGEST:
            self._long.append((table, name, found, len(found)))
        elif not _is_known(found, tensors):
            return
        elif not tensors:
            self._plain.append((table, name, found, _copy(found)))
        elif not any(tensor.is_inference() for tensor in tensors):  # of those no version is counted
            known = [(weakref.ref(tensor), tensor._version) for tensor in tensors]
            self._there.append((table, name, id(found), known))

    def learn(self) -> None:
        """The call is over. A tensor that it bound anew, or wrote to, is its result: to hold that would leak."""
        for table, name, key, known in self._there:
            found = table.get(name)
            tensors: list[Tensor] = []
            if id(found) != key or not _is_known(found, tensors):
                continue
            if [(id(t), t._version) for t in tensors] == [(id(then()), version) for then, version in known]:
                versions = [(tensor, tensor._version) for tensor in tensors]
                self._tensors.append((table, name, found, _copy(found), versions))
        self._there.clear()

    @property
    def put_back_ids(self) -> set[int]:
        """The ids of containers that `put_back` gives copies of, or longer ones cut."""
        return {id(found) for _, _, found, _ in (*self._plain, *self._long) if type(found) not in ATOMS}

    @property
    def tensors(self) -> Iterator[tuple[Tensor, int]]:
        """Those that `put_back` gives, with their versions when the call began."""
        return (known for *_, tensors in self._tensors for known in tensors)

    def put_back(self) -> None:
        """Let the modules have them again."""
        copies: dict[int, Any] = {}  # what two modules share stays one
        for table, name, found, content in self._plain:
            if table.get(name) is not found:
                table[name] = found
            if found is not content and found != content:
                table[name] = copies.setdefault(id(found), _copy(content))
        for table, name, found, length in self._long:
            cut = found if len(found) == length else copies.setdefault(id(found), _shortened(found, length))
            table[name] = cut
        for table, name, found, content, _ in self._tensors:
            table[name] = found if isinstance(found, Tensor) else copies.setdefault(id(found), _copy(content))


_CONTAINERS: Final = (list, tuple, set, frozenset, dict, deque)
_TAKEN: Final = (Tensor, Enum, *_CONTAINERS)
_KINDS: Final = frozenset({*_CONTAINERS, OrderedDict, defaultdict, Counter})
"""Whose copies are like them."""


def _is_known(found: Any, tensors: list[Tensor], depth: int = 0) -> bool:
    """Whether this is plain data, or tensors, or a container of such; puts the tensors into `tensors`."""
    if type(found) in ATOMS or isinstance(found, Enum):
        return True
    if isinstance(found, Tensor):
        tensors.append(found)
        return True
    if type(found) not in _KINDS or len(found) > LARGEST >> 3 * depth:
        return False
    inside = found.values() if isinstance(found, dict) else found
    names_are_plain = not isinstance(found, dict) or all(type(name) in ATOMS for name in found)
    return names_are_plain and all(_is_known(item, tensors, depth + 1) for item in inside)


def _copy(found: Any) -> Any:
    """The same containers once more, with the same tensors and plain data in them."""
    kind = type(found)
    if kind not in _KINDS:
        return found
    if isinstance(found, dict):
        made = copy.copy(found)
        for name, item in found.items():
            made[name] = _copy(item)
        return made
    items = [_copy(item) for item in found]
    return deque(items, found.maxlen) if kind is deque else kind(items)


def _shortened(found: Any, length: int) -> Any:
    if isinstance(found, list):
        return found[:length]
    made = copy.copy(found)
    for name in list(itertools.islice(found, length, None)):
        del made[name]
    return made
