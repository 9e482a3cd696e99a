"""Functions of torch that something of this package stands in for: several at once, and taken away in any order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Gives what stands in for a function, which it calls."""

_standing: dict[tuple[Any, str], tuple[Callable[..., Any], list[Make]]] = {}
"""By where a function is: what is there instead of it, and who stands in, the last one outermost."""


def stand_in(owner: Any, name: str, make: Make) -> Callable[[], None]:
    """Have `make(function)` stand in for the function `owner.name` until what this gives is called.

    `make` is called at each call. Whoever replaced the function since, and did not know of this, keeps their place.
    """
    if (owner, name) not in _standing:
        _standing[owner, name] = _installed(owner, name)
    instead, makes = _standing[owner, name]
    own: Make = functools.partial(make)  # another one at each call
    makes.append(own)

    def remove() -> None:
        makes[:] = [other for other in makes if other is not own]
        if not makes and vars(owner)[name] is instead:
            setattr(owner, name, vars(instead)["__wrapped__"])
            del _standing[owner, name]

    return remove


def _installed(owner: Any, name: str) -> tuple[Callable[..., Any], list[Make]]:
    original = vars(owner)[name]
    makes: list[Make] = []

    @functools.wraps(original)
    def instead(*args: Any, **kwargs: Any) -> Any:
        function = original
        for make in makes:
            function = make(function)
        return function(*args, **kwargs)

    setattr(owner, name, instead)
    return instead, makes
