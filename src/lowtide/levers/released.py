"""Outputs of a model without some of their fields, which say so when they are read."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any, NoReturn

from lowtide.errors import LowtideError


def without(output: Any, released: tuple[str, ...]) -> Any:
    """A copy of a transformers ModelOutput that lacks the fields `released`; still an instance of its class.

    Reading one of them, or all of the fields at once, raises LowtideError.
    """
    kept = {name: value for name, value in output.items() if name not in released}
    known: Any = type(output)
    kind: Any = _kind_without(known, released)
    made = kind.__new__(kind)
    OrderedDict.__init__(made)
    for name, value in kept.items():
        made[name] = value
    return made


@functools.cache
def _kind_without(kind: Any, released: tuple[str, ...]) -> type:
    """The class of such outputs. There are few: one for each kind of model."""
    first = next(iter(kind.__dataclass_fields__))

    def refuse(self: Any, *_: Any) -> NoReturn:
        raise _read(", ".join(released))

    def getitem(self: Any, key: Any) -> Any:
        key = first if key == 0 else key
        if not isinstance(key, str) or key in released:
            raise _read(key if isinstance(key, str) else f"[{key!r}]")
        return OrderedDict.__getitem__(self, key)

    def contains(self: Any, key: Any) -> bool:
        return key in released or OrderedDict.__contains__(self, key)

    members: dict[str, Any] = {name: property(functools.partial(_refused, name)) for name in released}
    members |= dict.fromkeys(("__iter__", "__len__", "keys", "values", "items", "to_tuple", "get", "copy"), refuse)
    members |= {"__getitem__": getitem, "__contains__": contains, "__bool__": lambda self: True}
    members |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce__": refuse}
    members["__repr__"] = lambda self: _shown(kind, released)
    return type(kind.__name__, (kind,), members)


def _shown(kind: type, released: tuple[str, ...]) -> str:
    return f"{kind.__name__}(its loss; {', '.join(released)} let go of by lowtide's lever 'outputs')"


def _refused(name: str, self: Any) -> NoReturn:
    raise _read(name)


def _read(what: str) -> Refused:
    return Refused(
        f"{what} of the model's outputs was let go of before backward, to save memory: the lever 'outputs' is on, "
        "since neither the rehearsed steps nor the step's code read anything but the loss. To read it, fit again with "
        "levers=() or others without 'outputs', or remove the plan for this call."
    )


class Refused(LowtideError):
    """A field that was let go of was read."""
