"""Reference cycles: unreachable objects that keep tensors alive until the garbage collector runs."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from types import FrameType, ModuleType
from typing import Any

from lowtide.diagnostics.leaks.holders import Holder
from lowtide.state.introspection import is_user_code

_LEVELS = 12
"""Largest number of references that are followed outwards from a tensor."""


def find_cycle_holder(tensor: Any, ignored: Iterable[int]) -> Holder | None:
    """Return the holder for a reference cycle that keeps `tensor` alive; None if other objects may keep it alive.

    The search does not see local variables of running functions.

    Args:
        tensor: A tensor that no variable, module or other named object holds.
        ignored: Ids of lists that refer to the tensor but do not count, such as the caller's.
    """
    level_of, objects = {id(tensor): 0}, [tensor]
    outermost, own = [tensor], {*ignored, id(level_of), id(objects)}
    for level in range(1, _LEVELS):
        own.add(id(outermost))
        referrers = [obj for obj in gc.get_referrers(*outermost) if id(obj) not in own and type(obj) is not FrameType]
        outermost = [obj for obj in referrers if id(obj) not in level_of]
        if any(isinstance(obj, ModuleType) or _is_namespace(obj) for obj in outermost):
            return None
        level_of |= {id(obj): level for obj in outermost}
        objects += outermost
        own.add(id(referrers))
        if not outermost:
            break
    referred = {id(referent) for obj in objects for referent in gc.get_referents(obj)}
    if outermost or len(objects) == 1 or not all(id(obj) in referred for obj in objects[1:]):
        return None  # something outside the cycle refers to one of the objects
    name = next(filter(None, (_find_link(obj, level_of) for obj in objects if is_user_code(type(obj)))), None)
    if name is None:
        return None
    text = f"a reference cycle through {name}, with the garbage collector off"
    return Holder(kind="cycle", text=text, key=f"cycle {name}", name=name)


def _is_namespace(obj: Any) -> bool:
    return isinstance(obj, dict) and "__name__" in obj and "__builtins__" in obj


def _find_link(obj: Any, level_of: dict[int, int]) -> str | None:
    """Return the attribute of `obj`, as `Class.name`, that refers to an object of the cycle farther from the tensor.

    Return None if no attribute does. `level_of` maps ids of objects to their distance from the tensor.
    """
    attributes = getattr(obj, "__dict__", None)
    for name, value in attributes.items() if isinstance(attributes, dict) else ():
        if level_of.get(id(value), 0) >= level_of[id(obj)]:
            return f"{type(obj).__qualname__}.{name}"
    return None
