"""The modules of a replayed call as an earlier call found them: state that has not changed is not captured again.

A block has a dozen modules with some twenty attributes each, and hardly any of them ever changes. One comparison of all
bindings, by identity, takes the place of separate captures of attributes, flags, parameters and hooks. Modules with
hooks, or with attributes whose contents may change unseen, are captured in each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from operator import is_
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from lowtide._torch.modules import GLOBAL_FORWARD_HOOKS
from lowtide.runtime.module_attributes import TORCHS

if TYPE_CHECKING:
    from lowtide.runtime.module_attributes import Attributes

_VALUES: Final = dict.values

Bindings = list[tuple[dict[str, Any], dict[str, Any]]]
"""Tables of attributes, buffers and parameters, each with a copy of its contents."""


class KnownModules:
    """Bindings of `modules`, and their attributes as a call that begins now has captured them."""

    __slots__ = (
        "_hooks",
        "_ids",
        "_kinds",
        "_modules",
        "_names",
        "_opaque",
        "_sizes",
        "_tables",
        "_tensors",
        "attributes",
    )

    def __init__(self, modules: tuple[nn.Module, ...], attributes: Attributes) -> None:
        self._modules, self.attributes = modules, attributes
        self._kinds = [*map(type, modules)]
        self._tables = [*_tables(modules)]
        self._hooks = [*GLOBAL_FORWARD_HOOKS, *_hooks(modules)]
        self._names, self._sizes = [*chain.from_iterable(self._tables)], [*map(len, self._tables)]
        self._tensors = _tensors(modules)
        values = [*chain.from_iterable(map(_VALUES, self._tables))]
        self._ids = [*map(id, values)]
        held = {*map(id, (*attributes.plain, *self._tensors, *modules))}
        named = enumerate(zip(self._names, values, strict=True))
        self._opaque = [(n, type(it)) for n, (name, it) in named if id(it) not in held and name not in TORCHS]
        """Other objects, which may be freed: a later one with the same id is no change if its type is the same."""

    def current(self) -> list[Any] | None:
        """Return the present content of all tables, if it is the known one; None if anything differs."""
        values = [*chain.from_iterable(map(_VALUES, self._tables))]
        if (
            [*map(id, values)] != self._ids
            or [*chain.from_iterable(self._tables)] != self._names
            or any(self._hooks)
            or [*map(type, self._modules)] != self._kinds
            or not self.attributes.is_unchanged
        ):
            return None
        for place, kind in self._opaque:
            if type(values[place]) is not kind:
                return None
        return values

    def rebind(self, values: list[Any]) -> None:
        """Undo every binding that was made, changed or removed since `current` returned these values."""
        now, names = [*chain.from_iterable(map(_VALUES, self._tables))], [*chain.from_iterable(self._tables)]
        if names == self._names and all(map(is_, now, values)):
            return
        pairs = zip(self._names, values, strict=True)
        rebind([(table, dict(islice(pairs, n))) for table, n in zip(self._tables, self._sizes, strict=True)])


def can_be_known(modules: tuple[nn.Module, ...], attributes: Attributes) -> bool:
    """Return True if a comparison by identity shows every change, and holds nothing that leads to a graph."""
    return (
        attributes.can_be_shared
        and all(isinstance(table, dict) for table in _tables(modules))
        and all(type(tensor) in (nn.Parameter, Tensor) and tensor.is_leaf for tensor in _tensors(modules))
    )


def bindings(modules: Iterable[nn.Module]) -> Bindings:
    """Return the bindings of the modules' attributes, buffers and parameters."""
    tables = (table for module in modules for table in (vars(module), module._buffers, module._parameters))
    # a scripted module's tables are no dicts and can't be rebound
    return [(table, dict(table)) for table in tables if table and isinstance(table, dict)]


def rebind(bindings: Bindings) -> None:
    """Undo all changes of the tables' bindings since `bindings` copied them."""
    for table, was in bindings:
        if len(table) != len(was):
            for name in table.keys() - was.keys():
                del table[name]
        table.update(was)


def _tables(modules: Iterable[nn.Module]) -> Iterator[dict[str, Any]]:
    for module in modules:
        yield from (vars(module), module._parameters, module._buffers, module._modules)


def _hooks(modules: Iterable[nn.Module]) -> Iterator[dict[int, Any]]:
    for module in modules:
        yield from (module._forward_pre_hooks, module._forward_hooks)


def _tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    tables = (table for module in modules for table in (module._parameters, module._buffers))
    return [tensor for table in tables for tensor in table.values() if tensor is not None]
