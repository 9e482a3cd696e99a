"""Gradients that a backward pass computes and `zero_grad` discards before an update reads them: the loss of another
model went through a graph that should have been cut off.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lowtide._torch.autograd_graph import leaves_of
from lowtide.diagnostics.leaks.live_tensors import storage_bytes
from lowtide.diagnostics.leaks.module_paths import find_outermost_modules
from lowtide.diagnostics.leaks.running_frames import find_variable_name
from lowtide.diagnostics.leaks.tensor_graphs import collect_computing_nodes, split_by_leaves
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from lowtide.diagnostics.leaks.call_log import Backward, CallLog
    from lowtide.diagnostics.leaks.call_site import Place
    from lowtide.diagnostics.leaks.finding_log import FindingLog

_WATCHED_PASSES = 24
"""Number of backward passes that are checked, from the first one on."""
_TIMES = 2
"""Number of times that gradients of a line's backward passes must be discarded before the line is reported."""


@dataclass(slots=True)
class _Pass:
    """One backward pass, and the parameters whose gradient it computes."""

    backward: Backward
    unread: set[int]
    """Ids of the parameters whose gradients no update has read and no `zero_grad` has reset since the pass."""
    others_read: bool = False
    """True once an update has read some gradients of the pass."""


@dataclass(slots=True)
class _LineRecord:
    """Record of all backward passes that one line of code starts."""

    n_discarded: int = 0
    parameters: set[int] = field(default_factory=set)
    """Ids of the parameters whose gradients were discarded."""
    is_needed: bool = False
    """True if the discarded gradients were ever read, or if other parameters get their gradient through the same part
    of the graph.
    """


class DiscardedGradients:
    """Check for gradients that each step computes and that `zero_grad` resets before their optimizer reads them.

    Example: a GAN whose discriminator is trained on generated images that are not detached. The pass counts only if an
    optimizer has read other gradients of it. If none has, the user's own code may have read the gradients.
    """

    def __init__(self, log: FindingLog, calls: CallLog) -> None:
        self._log, self._calls = log, calls
        self._n_passes = 0
        self._passes: list[_Pass] = []
        self._lines: dict[Place, _LineRecord] = {}
        self._trained: set[int] = set()
        """Ids of the parameters that an optimizer has updated."""

    @property
    def is_active(self) -> bool:
        """True until `_WATCHED_PASSES` backward passes have been checked."""
        return self._n_passes < _WATCHED_PASSES

    def backward_begins(self, nodes: Iterable[Node], backward: Backward) -> None:
        """Record the parameters whose gradients the backward pass that begins at `nodes` will compute."""
        if not self.is_active or backward.create_graph or backward.is_partial:
            return
        self._n_passes += 1
        graph = collect_computing_nodes(nodes)
        unread = {id(leaf) for leaf in leaves_of(graph) if isinstance(leaf, nn.Parameter)}
        self._passes.append(_Pass(backward, unread))
        line = self._lines.setdefault(backward.place, _LineRecord())
        if line.parameters:
            line.is_needed |= split_by_leaves(graph, line.parameters) is None

    def updated(self, parameters: Iterable[Tensor]) -> None:
        """Record that an optimizer has updated `parameters`, and so has read their gradients."""
        updated = {id(p) for p in parameters} if self._passes else set()
        self._trained |= updated
        for record in self._passes:
            read = record.unread & updated
            line = self._lines[record.backward.place]
            line.is_needed |= not line.parameters.isdisjoint(read)
            record.others_read |= bool(read)
            record.unread -= read

    def zeroed(self, parameters: Iterable[Tensor], place: Place, least_bytes: int) -> None:
        """Log the gradients of `parameters` that were never read, before `zero_grad` at `place` resets them.

        They are logged only if they take at least `least_bytes` bytes, and if gradients of an earlier backward pass
        from the same line were discarded, too.
        """
        given = {id(p): p for p in parameters} if self._passes else {}
        for record in self._passes:
            discarded = {n: given[n] for n in record.unread & given.keys() if given[n].grad is not None}
            record.unread -= given.keys()
            line = self._lines[record.backward.place]
            if not (discarded and record.others_read) or line.is_needed:
                continue
            line.parameters |= discarded.keys()
            line.n_discarded += 1
            n_bytes = sum(storage_bytes(p.grad) for p in discarded.values() if p.grad is not None)
            if line.n_discarded >= _TIMES and n_bytes >= least_bytes and discarded.keys() <= self._trained:
                self._report(record, set(discarded), n_bytes, place)
        self._passes = [each for each in self._passes if each.unread]

    def drop_needed(self) -> None:
        """Withdraw the findings about lines whose discarded gradients have turned out to be needed.

        Gradients are needed if an optimizer reads them in other steps, or if their part of the graph also leads to
        other parameters.
        """
        for place, line in self._lines.items():
            if line.is_needed:
                self._log.entries.pop(f"LT031 {place}", None)

    def _report(self, record: _Pass, parameters: set[int], n_bytes: int, place: Place) -> None:
        module = _find_module_of(parameters)
        if module is None:
            return
        name, backward = find_variable_name(module) or type(module).__name__, record.backward
        calls = (call for call in self._calls.known() if call.module_id == id(module) and backward in call.backwards)
        made_at = next((call.place for call in calls), None)
        self._log.record(
            "LT031",
            str(backward.place),
            held_bytes=n_bytes,
            step=backward.step,
            text=f"{name}: {format_bytes(n_bytes)} of gradients, computed by backward at {backward.place}, discarded "
            f"by zero_grad at {place}",
            name=name,
            remedy=", and no `retain_graph` there" if backward.retain_graph else "",
            made_at=made_at,
            backward=backward,
        )


def _find_module_of(parameters: set[int]) -> nn.Module | None:
    """Return the outermost module whose parameters' ids are all in `parameters`; None if there is none."""
    modules = [obj for obj in gc.get_objects() if isinstance(obj, nn.Module)]
    for root in find_outermost_modules(modules):
        for module in root.modules():
            own = {id(p) for p in module.parameters()}
            if own and own <= parameters:
                return module
    return None
