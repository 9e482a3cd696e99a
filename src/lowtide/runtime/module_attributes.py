"""Capture the attributes of modules when a call begins, and restore them when backward replays the call.

Training code sets attributes of modules before a call, such as the kind of data in a batch, the temperature of a
softmax or the condition of a block, and changes or deletes them before backward. A capture has numbers, strings and
similar data, tensors that the call itself leaves in place, and lists, tuples, sets and dicts of these. Long lists and
dicts count as logs: entries added after the start of the call are removed. Everything else on a module, or reachable
through it, must be unchanged when the call runs again.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from operator import is_
from typing import Any, Final

from torch import Tensor, nn

from lowtide._torch.modules import CALL
from lowtide._torch.tensors import get_storage_id
from lowtide.runtime.call_arguments import ATOMS

LARGEST: Final = 100
"""Largest number of entries of a captured container, an eighth of it for nested ones; larger ones are data or logs.
"""

TORCHS: Final = frozenset(vars(nn.Module())) | {CALL}
"""Names of the attributes that every module has; those that a call reads are captured elsewhere."""

Table = dict[str, Any]
"""Type of a module's `__dict__`."""


class Attributes:
    """Attributes of `modules`, captured at the start of a call, so that a replay of the call can restore them."""

    __slots__ = ("_long", "_plain", "_tensors", "_there", "contents", "mutable")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._plain: list[tuple[Table, str, Any, Any]] = []
        """Attributes without tensors (table, name, object) and copies of their contents."""
        self.mutable: list[Any] = []
        """Attributes without tensors that are lists, dicts and similar containers."""
        self.contents: list[Any] = []
        """Copies of `mutable`."""
        self._long: list[tuple[Table, str, Any, int]] = []
        """Long containers (table, name, container) and their lengths."""
        self._there: list[tuple[Table, str, int, list[tuple[weakref.ref[Tensor], int]]]] = []
        """Attributes that hold tensors: table, name, id of the object, and its tensors (weakly) with their versions."""
        self._tensors: list[tuple[Table, str, Any, Any, list[tuple[Tensor, int]]]] = []
        for table in map(vars, modules):
            for name, value in table.items():
                if name in TORCHS:
                    continue
                if id(type(value)) in _ATOMS:
                    self._plain.append((table, name, value, value))
                elif isinstance(value, _TAKEN):
                    self._capture(table, name, value)

    def _capture(self, table: Table, name: str, value: Any) -> None:
        tensors: list[Tensor] = []
        if isinstance(value, list | dict) and len(value) > LARGEST:
            self._long.append((table, name, value, len(value)))
        elif not _add_tensors(value, tensors):
            return
        elif not tensors:
            content = _copy(value)
            self._plain.append((table, name, value, content))
            if content is not value:
                self.mutable.append(value)
                self.contents.append(content)
        elif not any(tensor.is_inference() for tensor in tensors):  # inference tensors count no versions
            known = [(weakref.ref(tensor), tensor._version) for tensor in tensors]
            self._there.append((table, name, id(value), known))

    def learn(self) -> None:
        """Record the end of the call: hold the captured tensors, except those that the call rebound or wrote to. These
        are results of the call, and holding them would leak memory.
        """
        for table, name, key, known in self._there:
            value = table.get(name)
            tensors: list[Tensor] = []
            if id(value) != key or not _add_tensors(value, tensors):
                continue
            if [(id(t), t._version) for t in tensors] == [(id(then()), version) for then, version in known]:
                versions = [(tensor, tensor._version) for tensor in tensors]
                self._tensors.append((table, name, value, _copy(value), versions))
        self._there.clear()

    @property
    def can_be_shared(self) -> bool:
        """Return True if later calls can share this capture, because it has no tensors and no long containers."""
        return not (self._long or self._there or self._tensors)

    @property
    def is_unchanged(self) -> bool:
        """Return True if the captured containers, such as lists and dicts, have the contents that they had at the start
        of the call.
        """
        return all(map(_equals_copy, self.mutable, self.contents))

    @property
    def plain(self) -> list[Any]:
        """Return the captured attributes that hold no tensors."""
        return [value for _, _, value, _ in self._plain]

    @property
    def restored_ids(self) -> set[int]:
        """Return the ids of containers that `restore` replaces by copies or truncated copies."""
        return {id(value) for _, _, value, _ in (*self._plain, *self._long) if id(type(value)) not in _ATOMS}

    @property
    def tensors(self) -> Iterator[tuple[Tensor, int]]:
        """Return the tensors that `restore` binds again, with their versions at the start of the call."""
        return (known for *_, tensors in self._tensors for known in tensors)

    def held(self) -> Iterator[Tensor]:
        """Yield the tensors that `restore` binds again, including those that `learn` may add."""
        yield from (tensor for tensor, _ in self.tensors)
        yield from (tensor for *_, known in self._there for then, _ in known if (tensor := then()) is not None)

    def copy(self, storages: set[int], copy_of: Callable[[Tensor], Tensor]) -> bool:
        """Replace captured tensors in `storages`, which are about to be written to, by copies; return True if any was
        replaced.
        """
        has_copied = False

        def before_write(leaf: Any) -> Any:
            is_written = isinstance(leaf, Tensor) and get_storage_id(leaf) in storages
            return copy_of(leaf) if is_written else leaf

        for n, (table, name, value, content, known) in enumerate(self._tensors):
            if any(tensor._version == version and get_storage_id(tensor) in storages for tensor, version in known):
                has_copied, tensors = True, list[Tensor]()
                content = _copy(content, before_write)
                _add_tensors(content, tensors)
                versions = [(tensor, tensor._version) for tensor in tensors]
                self._tensors[n] = table, name, content if isinstance(value, Tensor) else value, content, versions
        return has_copied

    def restore(self) -> None:
        """Restore the modules' attributes to those at the start of the call."""
        copies: dict[int, Any] = {}  # containers that two modules share stay shared
        for table, name, value, content in self._plain:
            if table.get(name) is not value:
                table[name] = value
            if not _equals_copy(value, content):
                table[name] = copies.setdefault(id(value), _copy(content))
        for table, name, value, length in self._long:
            cut = value if len(value) == length else copies.setdefault(id(value), _cut_log(value, length))
            table[name] = cut
        for table, name, value, content, _ in self._tensors:
            table[name] = value if isinstance(value, Tensor) else copies.setdefault(id(value), _copy(content))


_CONTAINERS: Final = (list, tuple, set, frozenset, dict, deque)
_TAKEN: Final = (Tensor, Enum, *_CONTAINERS)
_KINDS: Final = (*_CONTAINERS, OrderedDict, defaultdict, Counter)
"""Types of plain data, whose values can be compared and copied."""
_ATOMS: Final = frozenset(map(id, ATOMS))  # by id: a metaclass may make its classes unhashable


def _add_tensors(value: Any, tensors: list[Tensor], depth: int = 0) -> bool:
    """Append the tensors in `value` to `tensors`. Return True if `value` consists only of tensors, plain data such as
    numbers and strings, and containers of them.
    """
    if id(type(value)) in _ATOMS or isinstance(value, Enum):
        return True
    if isinstance(value, Tensor):
        tensors.append(value)
        return True
    if type(value) not in _KINDS or len(value) > LARGEST >> 3 * depth:
        return False
    inside = value.values() if isinstance(value, dict) else value
    names_are_plain = not isinstance(value, dict) or all(id(type(name)) in _ATOMS for name in value)
    return names_are_plain and all(_add_tensors(item, tensors, depth + 1) for item in inside)


def _copy(value: Any, leaf: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """Return a copy of `value` and the containers in it, with `leaf(item)` for each tensor and piece of plain data."""
    kind = type(value)
    if kind not in _KINDS:
        return leaf(value)
    if isinstance(value, dict):
        made = copy.copy(value)
        for name, item in value.items():
            made[name] = _copy(item, leaf)
        return made
    items = [_copy(item, leaf) for item in value]
    if kind in (tuple, frozenset) and all(map(is_, items, value)):
        return value
    return deque(items, value.maxlen) if kind is deque else kind(items)


def _equals_copy(value: Any, content: Any) -> bool:
    """Return True if `value` equals `content`, an earlier copy of plain data. Tensors put into `value` since then are
    not compared.
    """
    if value is content:
        return True
    kind = type(value)
    if kind is not type(content):
        return False
    if kind not in _KINDS or kind in (set, frozenset):
        return bool(value == content)
    if len(value) != len(content):
        return False
    if isinstance(value, dict):
        return [*value] == [*content] and all(map(_equals_copy, value.values(), content.values()))
    return all(map(_equals_copy, value, content))


def _cut_log(value: Any, length: int) -> Any:
    if isinstance(value, list):
        return value[:length]
    made = copy.copy(value)
    for name in list(itertools.islice(value, length, None)):
        del made[name]
    return made
