"""Gradients of parameters that are in no optimizer. Backward adds to them in each step, and nothing resets them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lowtide._torch.optim import list_parameters
from lowtide._torch.tensors import get_storage_id, has_accumulation_hooks, has_gradient_hooks
from lowtide.diagnostics.leaks.live_tensors import storage_bytes
from lowtide.diagnostics.leaks.module_paths import find_outermost_modules, module_names
from lowtide.diagnostics.leaks.running_frames import find_variable_name
from lowtide.diagnostics.leaks.tensor_graphs import collect_computing_nodes, map_kept_bytes, split_by_leaves
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from lowtide.diagnostics.leaks.call_log import SiteStats
    from lowtide.diagnostics.leaks.finding_log import FindingLog
    from lowtide.diagnostics.leaks.live_tensors import LiveObjects

_INSPECTED_UPDATES = (2, 4)
"""Numbers of updates after which gradients are inspected: first to find candidates, then to check that their gradients
are still there.
"""


@dataclass(slots=True)
class _Candidate:
    """A parameter outside all optimizers, and its gradient at the first inspection."""

    parameter: weakref.ref[Tensor]
    gradient: weakref.ref[Tensor]
    was_zero: bool

    @property
    def is_idle(self) -> bool:
        """True if the gradient is the same tensor as before and not zero: nothing has reset it to zero or None."""
        parameter, gradient = self.parameter(), self.gradient()
        if parameter is None or gradient is None or parameter.grad is not gradient:
            return False
        return bool(gradient.count_nonzero())

    @property
    def is_always_zero(self) -> bool:
        """True if the gradient was zero at both inspections, as for a bias whose effect on the loss cancels out."""
        parameter, gradient = self.parameter(), self.gradient()
        is_same = parameter is not None and gradient is not None and parameter.grad is gradient
        return is_same and self.was_zero and not self.is_idle


@dataclass(slots=True)
class _Idle:
    """A module whose gradients nothing reads or resets."""

    module: weakref.ref[nn.Module]
    name: str
    gradient_bytes: int
    step: int


class UnreadGradients:
    """Check for gradients that no optimizer reads. It inspects all gradients after an early and a later update."""

    def __init__(self, log: FindingLog) -> None:
        self._log = log
        self._n_updates = 0
        self._updated: set[int] = set()
        """Ids of the parameters that optimizers updated, until the first inspection: these optimizers may be gone."""
        self._has_looked = False
        self._candidates: dict[int, _Candidate] = {}
        self._idle: list[_Idle] = []

    def updated(self, parameters: Iterable[Tensor]) -> None:
        """Count an optimizer's update of `parameters`."""
        self._n_updates += 1
        if not self._has_looked:
            self._updated.update(map(id, parameters))

    def step_begins(self, live: LiveObjects, model: nn.Module | None, step: int, least_bytes: int) -> None:
        """Look for unread gradients before a step's first forward: first for candidates, later for idle modules.

        A loop that resets gradients after each update has none at that point. Modules with less than `least_bytes`
        bytes of gradients do not count.
        """
        if not self._has_looked and self._n_updates >= _INSPECTED_UPDATES[0]:
            self._has_looked = True
            self._candidates = {
                id(p): _Candidate(weakref.ref(p), weakref.ref(gradient), not gradient.count_nonzero())
                for p in _find_outside_optimizers(live)
                if id(p) not in self._updated
                and not _is_read(p)
                and (gradient := p.grad) is not None
                and gradient.grad_fn is None
            }
            self._updated.clear()
            return
        if self._n_updates < _INSPECTED_UPDATES[1] or not self._candidates:
            return
        idle = {number for number, candidate in self._candidates.items() if candidate.is_idle}
        unsure = {number for number, candidate in self._candidates.items() if candidate.is_always_zero}
        names = module_names(model, live.modules)
        for root in find_outermost_modules(live.modules):
            root_name = find_variable_name(root)
            for module in _find_idle_modules(root, idle, unsure):
                name = names[id(module)]
                if root_name is not None:
                    name = ".".join((root_name, *name.split(".")[1:]))
                gradient_bytes = sum(storage_bytes(p.grad) for p in module.parameters() if p.grad is not None)
                if gradient_bytes >= least_bytes:
                    self._idle.append(_Idle(weakref.ref(module), name, gradient_bytes, step))
        self._candidates.clear()

    def backward_begins(self, nodes: Iterable[Node], stats: Iterable[SiteStats]) -> None:
        """Log the modules with unread gradients, and the bytes that the graph at `nodes` keeps for them."""
        if not self._idle:
            return
        graph = collect_computing_nodes(nodes)
        for idle in self._idle:
            module = idle.module()
            if module is not None:
                self._report(idle, module, graph, list(stats))
        self._idle.clear()

    def _report(self, idle: _Idle, module: nn.Module, graph: list[Node], stats: list[SiteStats]) -> None:
        name, gradient_bytes, step = idle.name, idle.gradient_bytes, idle.step
        calls = [s for s in stats if id(module) in s.module_ids]
        place = calls[0].site.place if calls else None
        graph_bytes = _count_avoidable_bytes(graph, module)
        if graph_bytes is not None:
            is_shared = any(s.site.place == place and s.module_ids.keys() != {id(module)} for s in stats)
            remedy = f"run the forward at {place} under `torch.no_grad()`"
            if place is None or is_shared:
                also = f" ({place} runs other models, too)" if place else ""
                remedy = f"call `{name}` under `torch.no_grad()`{also}"
            saves = f" and {format_bytes(graph_bytes)} that its forward saves for backward"
        else:
            remedy, graph_bytes, saves = f"`{name}.requires_grad_(False)`", 0, ""
        self._log.record(
            "LT024",
            name,
            held_bytes=gradient_bytes + graph_bytes,
            step=step,
            text=f"{name}: {format_bytes(gradient_bytes)} of gradients{saves}",
            name=name,
            remedy=remedy,
            made_at=place,
        )


def _count_avoidable_bytes(graph: list[Node], module: nn.Module) -> int | None:
    """Return the bytes that `graph` would not save if `module` ran under `torch.no_grad()`.

    Return None if gradients flow through the module to other parameters, because `no_grad` would cut them off.
    """
    parts = split_by_leaves(graph, {id(p) for p in module.parameters()})
    if parts is None:
        return None
    first, others = parts
    saved, context = map_kept_bytes(first)
    kept_anyway = {**dict.fromkeys(map(get_storage_id, module.parameters()))}
    for kept in map_kept_bytes(others):
        kept_anyway |= dict.fromkeys(kept)
    return sum(n for number, n in {**saved, **context}.items() if number not in kept_anyway)


def _find_outside_optimizers(live: LiveObjects) -> Iterator[Tensor]:
    """Yield the parameters that have a gradient and are in no optimizer."""
    trained = {id(p) for optimizer in live.optimizers for p in list_parameters(optimizer)}
    for tensor in live.tensors:
        if isinstance(tensor, nn.Parameter) and tensor.grad is not None and id(tensor) not in trained:
            yield tensor


def _is_read(parameter: Tensor) -> bool:
    """Return True if a hook of the parameter may read its gradient."""
    return has_gradient_hooks(parameter) or has_accumulation_hooks(parameter)


def _find_idle_modules(module: nn.Module, idle: set[int], unsure: set[int]) -> Iterator[nn.Module]:
    """Yield the largest modules inside `module` whose trained parameters are all in `idle` or `unsure`.

    Both are sets of ids of parameters. At least one parameter of a yielded module is in `idle`.
    """
    with_gradient = [p for p in module.parameters() if p.grad is not None]
    if not any(id(p) in idle for p in with_gradient):
        return
    if all(id(p) in idle | unsure for p in with_gradient) and all(
        p.grad is not None for p in module.parameters() if p.requires_grad
    ):
        yield module
        return
    for child in module.children():
        yield from _find_idle_modules(child, idle, unsure)
