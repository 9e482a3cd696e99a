"""Detection of weight updates by the user's own code, in loops without an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lowtide._torch.autograd_graph import leaves_of
from lowtide.diagnostics.leaks.tensor_graphs import collect_computing_nodes

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from lowtide.diagnostics.leaks.call_log import CallLog

_PARAMETERS, _ELEMENTS = 16, 8
"""Number of parameters of a module, and of elements of each, that are compared."""

_WITHOUT_MODEL = 0
"""Key for the leaves of a loop without a model. It never equals the id of a module."""


class HandUpdates:
    """Check for weights that change between calls of their module although no optimizer has stepped.

    Values are compared, because updates through `.data` leave no other trace, and only after a backward pass.
    """

    def __init__(self, calls: CallLog) -> None:
        self._calls = calls
        self._n_backwards: dict[int, int] = {}  # id of a module -> backward passes before its last call
        self._weights: dict[int, tuple[float, ...]] = {}  # id of a parameter -> some of its values

    def compare_weights(self, module: nn.Module) -> bool:
        """Return True if weights of `module` have changed since its previous call, with a backward pass in between.

        The weights are recorded for the next comparison.
        """
        return self._compare(id(module), lambda: _list_trained(module))

    def compare_leaves(self, nodes: Iterable[Node]) -> bool:
        """Return True if leaves of the graph at `nodes` have changed, or are new tensors, since the last backward pass.

        The leaves are recorded for the next comparison. This is for loops that call no model.
        """
        return self._compare(_WITHOUT_MODEL, lambda: _find_leaves(nodes))

    def _compare(self, number: int, tensors: Callable[[], Iterable[Tensor]]) -> bool:
        if self._calls.last_updates or self._n_backwards.get(number) == self._calls.n_backwards:
            return False
        self._n_backwards[number] = self._calls.n_backwards
        weights: dict[int, tuple[float, ...]] = {}
        with suppress(RuntimeError):  # weights inside a functional transform have no values
            weights = _sample_weights(tensors())
        has_changed = any(self._weights.get(number, values) != values for number, values in weights.items())
        are_new = self._weights.keys().isdisjoint(weights)  # updates that make new tensors, as in functional style
        self._weights |= weights
        return (has_changed or (are_new and number == _WITHOUT_MODEL)) and self._calls.n_backwards > 0


def _list_trained(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if type(p) is nn.Parameter and p.requires_grad]


def _find_leaves(nodes: Iterable[Node]) -> list[Tensor]:
    leaves = {id(leaf): leaf for leaf in leaves_of(collect_computing_nodes(nodes))}
    return [leaf for leaf in leaves.values() if type(leaf) in (Tensor, nn.Parameter)]


def _sample_weights(weights: Iterable[Tensor]) -> dict[int, tuple[float, ...]]:
    weights = [p for p in weights if p.device.type != "meta" and p.numel() and not p.is_sparse]
    some = weights[:: 1 + len(weights) // _PARAMETERS]
    return {id(p): tuple(p.detach().as_strided((min(p.numel(), _ELEMENTS),), (1,)).tolist()) for p in some}
