"""Outputs of a model without some of their fields; reading a released field raises an error that explains it."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any, NoReturn

from torch import Tensor

from lowtide.errors import LowtideError


def without(output: Any, released: tuple[str, ...]) -> Any:
    """Return a copy of a transformers model's output that holds only its loss, without the fields named in `released`.

    Reading a released field, or all fields at once, raises Refused. The class keeps its name.
    """
    return only_loss(type(output), released, loss=output["loss"], lever="outputs")


def only_loss(kind: Any, released: tuple[str, ...], *, loss: Tensor, lever: str) -> Any:
    """Build an output of the class `kind` that holds only `loss`; `released` names the fields that are left out.

    Reading a released field, or all fields at once, raises Refused, which names `lever` as the reason.
    """
    cls: Any = _build_class_without(kind, released, lever)
    output = cls.__new__(cls)
    OrderedDict.__init__(output)
    output["loss"] = loss
    return output


@functools.cache
def _build_class_without(kind: Any, released: tuple[str, ...], lever: str) -> type:
    """Build a subclass of `kind` whose instances raise Refused if a field in `released` is read; results are cached."""
    first = next(iter(kind.__dataclass_fields__))

    def refuse(self: Any, *_: Any) -> NoReturn:
        raise _build_refusal(", ".join(released), lever)

    def getitem(self: Any, key: Any) -> Any:
        key = first if key == 0 else key
        if not isinstance(key, str) or key in released:
            raise _build_refusal(key if isinstance(key, str) else f"[{key!r}]", lever)
        return OrderedDict.__getitem__(self, key)

    def contains(self: Any, key: Any) -> bool:
        return key in released or OrderedDict.__contains__(self, key)

    def shown(self: Any) -> str:
        return f"{kind.__name__}(loss={self.loss}; {', '.join(released)} freed by lowtide's lever {lever!r})"

    members: dict[str, Any] = {name: property(functools.partial(_refused, name, lever)) for name in released}
    members |= dict.fromkeys(("__iter__", "__len__", "keys", "values", "items", "to_tuple", "get", "copy"), refuse)
    members |= {"__getitem__": getitem, "__contains__": contains, "__bool__": lambda self: True, "__repr__": shown}
    members |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce__": refuse}
    return type(kind.__name__, (kind,), members)


def _refused(name: str, lever: str, self: Any) -> NoReturn:
    raise _build_refusal(name, lever)


def _build_refusal(field: str, lever: str) -> Refused:
    return Refused(
        f"{field} of the model's outputs was freed to save memory: the lever {lever!r} is on, since the rehearsed "
        f"steps read nothing but the loss. To read it, fit again with levers=() or others without {lever!r}, or remove "
        "the plan for this call."
    )


class Refused(LowtideError):
    """Error for reading a field of the outputs that was released."""
