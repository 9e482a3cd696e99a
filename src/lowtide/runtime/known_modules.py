"""The modules of a replayed call as an earlier call found them: state that has not changed is not captured again.

A block has a dozen modules with some twenty attributes each, and hardly any of them ever changes. One comparison of all
bindings, by identity, takes the place of separate captures of attributes, flags, parameters and hooks. Modules with
hooks, or with attributes whose contents may change unseen, are captured in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from operator import is_
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from lowtide._torch.modules import CALL, GLOBAL_FORWARD_HOOKS
from lowtide.runtime.module_attributes import TORCHS
from lowtide.runtime.saved_values import native

if TYPE_CHECKING:
    from lowtide.runtime.module_attributes import Attributes

_VALUES: Final = dict.values
_TORCHS: Final = TORCHS - {CALL}
"""Names of torch's own tables and flags, which may be held; not the interceptor, which leads here."""

Bindings = list[tuple[dict[str, Any], dict[str, Any]]]
"""Tables of attributes, buffers and parameters, each with a copy of its contents."""


class KnownModules:
    """Attributes, parameters, buffers and children of `modules` as one call found them.

    Later calls compare them, by identity, with the present ones. `attributes` is the call's own capture of attributes.
    """

    __slots__ = (
        "_hooks",
        "_kinds",
        "_modules",
        "_names",
        "_opaque",
        "_sizes",
        "_tables",
        "_values",
        "attributes",
    )

    def __init__(self, modules: tuple[nn.Module, ...], attributes: Attributes) -> None:
        self._modules, self.attributes = modules, attributes
        self._kinds = [*map(type, modules)]
        self._tables = [*_tables(modules)]
        self._hooks = [*GLOBAL_FORWARD_HOOKS, *_hooks(modules)]
        self._names, self._sizes = [*chain.from_iterable(self._tables)], [*map(len, self._tables)]
        self._values: list[Any] = []
        """Contents of all tables, with None in the places of objects that must not be held."""
        self._opaque: list[tuple[int, dict[str, Any], str, int, type]] = []
        """Index, table, name, id and type of each object that must not be held. An object with the same id and type
        counts as the same object.
        """
        held = {*map(id, (None, *attributes.plain, *_tensors(modules), *modules))}
        for table in self._tables:
            for name, value in table.items():
                is_held = id(value) in held or name in _TORCHS
                if not is_held:
                    self._opaque.append((len(self._values), table, name, id(value), type(value)))
                self._values.append(value if is_held else None)

    def current(self) -> list[Any] | None:
        """Return the present attributes, parameters, buffers and children of the modules; None if any has changed.

        Objects are compared by identity with those at construction.
        """
        values = self._values
        if self._opaque:
            values = values.copy()
            for place, table, name, key, kind in self._opaque:
                value = table.get(name)
                if id(value) != key or type(value) is not kind:
                    return None
                values[place] = value
        is_known = (
            _binds(self._tables, self._names, values)
            and not any(self._hooks)
            and [*map(type, self._modules)] == self._kinds
            and (not self.attributes.mutable or self.attributes.is_unchanged)
        )
        return values if is_known else None

    def rebind(self, values: list[Any]) -> None:
        """Restore the tables to `values`, which `current` returned: undo bindings added, changed or removed since."""
        if not _binds(self._tables, self._names, values):
            pairs = zip(self._names, values, strict=True)
            rebind([(table, dict(islice(pairs, n))) for table, n in zip(self._tables, self._sizes, strict=True)])


def can_be_known(modules: tuple[nn.Module, ...], attributes: Attributes) -> bool:
    """Return True if a comparison of identities shows every change of the modules, and if holding their contents keeps
    no autograd graph alive.
    """
    return (
        attributes.can_be_shared
        and all(isinstance(table, dict) for table in _tables(modules))
        and all(type(tensor) in (nn.Parameter, Tensor) and tensor.is_leaf for tensor in _tensors(modules))
    )


def bindings(modules: Iterable[nn.Module]) -> Bindings:
    """Return each module's dicts of attributes, buffers and parameters, paired with shallow copies for `rebind`."""
    tables = (table for module in modules for table in (vars(module), module._buffers, module._parameters))
    # a scripted module's tables are no dicts and can't be rebound
    return [(table, dict(table)) for table in tables if table and isinstance(table, dict)]


def rebind(bindings: Bindings) -> None:
    """Restore each dict of attributes, buffers or parameters to the contents that the function `bindings` copied."""
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


def _binds_in_python(tables: list[dict[str, Any]], names: list[str], values: list[Any]) -> bool:
    """Return True if the dicts `tables`, one after another, have exactly the keys `names` with the objects `values`."""
    now = chain.from_iterable(map(_VALUES, tables))
    return all(map(is_, now, values)) and [*chain.from_iterable(tables)] == names


_binds: Callable[..., bool] = _binds_in_python if native is None else native.binds
