"""Updates of weights by the user's own code, in loops without an optimizer."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from lowtide.diagnostics.leaks.call_log import CallLog

_PARAMETERS, _ELEMENTS = 16, 8
"""Number of parameters of a module, and of elements of each, that are compared."""


class HandUpdates:
    """Check for weights that change between calls of their module although no optimizer has stepped.

    Values are compared, because updates through `.data` leave no other trace, and only after a backward pass.
    """

    def __init__(self, calls: CallLog) -> None:
        self._calls = calls
        self._n_backwards: dict[int, int] = {}  # id of a module -> backward passes before its last call
        self._weights: dict[int, tuple[float, ...]] = {}  # id of a parameter -> some of its values

    def has_updated(self, module: nn.Module) -> bool:
        """Return True if weights of `module` have changed since it was called before."""
        if self._calls.last_updates or self._n_backwards.get(id(module)) == self._calls.n_backwards:
            return False
        self._n_backwards[id(module)] = self._calls.n_backwards
        weights: dict[int, tuple[float, ...]] = {}
        with suppress(RuntimeError):  # weights inside a functional transform have no values
            weights = _some_weights(module)
        has_changed = any(self._weights.get(number, values) != values for number, values in weights.items())
        self._weights |= weights
        return has_changed and self._calls.n_backwards > 0


def _some_weights(module: nn.Module) -> dict[int, tuple[float, ...]]:
    weights = [p for p in module.parameters() if type(p) is nn.Parameter and p.requires_grad]
    weights = [p for p in weights if p.device.type != "meta" and p.numel() and not p.is_sparse]
    some = weights[:: 1 + len(weights) // _PARAMETERS]
    return {id(p): tuple(p.detach().as_strided((min(p.numel(), _ELEMENTS),), (1,)).tolist()) for p in some}
