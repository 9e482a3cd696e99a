"""Gradients of parameters that no optimizer has: they are added to over several updates, and never reset."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lowtide._torch.tensors import has_accumulation_hooks, has_gradient_hooks
from lowtide.diagnostics.leaks.inspection import module_names, roots_of
from lowtide.diagnostics.leaks.live_tensors import LiveObjects, storage_bytes
from lowtide.diagnostics.leaks.running_frames import variable_name
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.diagnostics.leaks.call_log import SiteStats
    from lowtide.diagnostics.leaks.finding_log import FindingLog

_INSPECTED_UPDATES = (2, 4)
"""Updates after which the process is looked at: first for candidates, then for whether they are still there."""


@dataclass(slots=True)
class _Candidate:
    """A parameter outside all optimizers, with its gradient at the first look."""

    parameter: weakref.ref[Tensor]
    gradient: weakref.ref[Tensor]

    @property
    def is_idle(self) -> bool:
        """True if the gradient was added to all the time, and never set to zero or None."""
        parameter, gradient = self.parameter(), self.gradient()
        if parameter is None or gradient is None or parameter.grad is not gradient:
            return False
        return bool(gradient.count_nonzero())


class UnreadGradients:
    """Looks after an early update and a later one for gradients that no optimizer has."""

    def __init__(self, log: FindingLog) -> None:
        self._log = log
        self._n_updates = 0
        self._candidates: dict[int, _Candidate] = {}

    def updated(self) -> None:
        """Handle an optimizer's update."""
        self._n_updates += 1
        if self._n_updates == _INSPECTED_UPDATES[0]:
            live = LiveObjects()
            self._candidates = {
                id(p): _Candidate(weakref.ref(p), weakref.ref(gradient))
                for p in _outside_optimizers(live)
                if not _is_read(p) and (gradient := p.grad) is not None and gradient.grad_fn is None
            }

    def step_begins(self, model: nn.Module | None, stats: Iterable[SiteStats], step: int, least_bytes: int) -> None:
        """Handle the first forward of a step: gradients that are still there have not been read by an update."""
        if self._n_updates < _INSPECTED_UPDATES[1] or not self._candidates:
            return
        live = LiveObjects()
        idle = {number for number, candidate in self._candidates.items() if candidate.is_idle}
        names = module_names(model, live.modules)
        for root in roots_of(live.modules):
            for module in _idle_modules(root, idle):
                name = variable_name(module) if module is root else None
                self._report(module, name or names[id(module)], list(stats), step, least_bytes)
        self._candidates.clear()

    def _report(self, module: nn.Module, name: str, stats: list[SiteStats], step: int, least_bytes: int) -> None:
        gradient_bytes = sum(storage_bytes(p.grad) for p in module.parameters() if p.grad is not None)
        if gradient_bytes < least_bytes:
            return
        calls = [s for s in stats if id(module) in s.module_ids]
        place = calls[0].site.place if calls else None
        graph_bytes = max((s.graph_bytes for s in calls), default=0)
        if calls and not any(s.has_inputs_with_gradients for s in calls):
            remedy = f"run the forward at {place} under `torch.no_grad()`"
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


def _outside_optimizers(live: LiveObjects) -> Iterator[Tensor]:
    """Yield parameters with a gradient that are in no optimizer; none unless an optimizer has others."""
    trained = {
        id(p)
        for optimizer in live.optimizers
        for group in getattr(optimizer, "param_groups", ())
        for p in group["params"]
    }
    for tensor in live.tensors:
        if isinstance(tensor, nn.Parameter) and tensor.grad is not None and id(tensor) not in trained:
            yield tensor


def _is_read(parameter: Tensor) -> bool:
    """Return True if a hook of the parameter may read its gradient."""
    return has_gradient_hooks(parameter) or has_accumulation_hooks(parameter)


def _idle_modules(module: nn.Module, idle: set[int]) -> Iterator[nn.Module]:
    """Yield the largest modules in which every parameter with a gradient is idle."""
    with_gradient = [p for p in module.parameters() if p.grad is not None]
    if not any(id(p) in idle for p in with_gradient):
        return
    if all(id(p) in idle for p in with_gradient) and all(
        p.grad is not None for p in module.parameters() if p.requires_grad
    ):
        yield module
        return
    for child in module.children():
        yield from _idle_modules(child, idle)
