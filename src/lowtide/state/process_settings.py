"""Restorable settings of the process: environment variables and decimal contexts."""

from __future__ import annotations

import decimal
import os
from collections.abc import Callable

SETTERS = frozenset({"environ", "putenv", "getcontext", "setcontext", "localcontext"})
"""Names by which code reads or changes environment variables or decimal contexts."""

_ATTRIBUTES = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp", "flags", "traps")


def make_settings_restorer() -> Callable[[], None]:
    """Return a function that restores the environment variables and this thread's decimal context."""
    environment = dict(os.environ)
    context = decimal.getcontext()
    restore_context = make_decimal_restorer(context)

    def restore() -> None:
        if os.environ != environment:
            for name in os.environ.keys() - environment.keys():
                del os.environ[name]
            os.environ.update(environment)
        decimal.setcontext(context)
        restore_context()

    return restore


def make_decimal_restorer(context: decimal.Context) -> Callable[[], None]:
    """Return a function that restores a decimal context in place."""
    before = context.copy()

    def restore() -> None:
        for name in _ATTRIBUTES:
            setattr(context, name, getattr(before, name))

    return restore
