"""Models, optimizers and parameters that a program keeps and no longer uses."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lowtide.diagnostics.leaks.holders import Holder
from lowtide.diagnostics.leaks.live_tensors import LiveObjects, map_standing_storages
from lowtide.diagnostics.leaks.module_paths import find_outermost_modules
from lowtide.diagnostics.leaks.optimizer_orphans import Orphans, find_orphans
from lowtide.diagnostics.leaks.retained_holders import assign_holders, make_holder_search
from lowtide.diagnostics.leaks.retained_object import RetainedObject

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.diagnostics.leaks.inspection import InspectionInput

LEAST_COPIES = 3
"""Smallest number of models, or of optimizers, of one class among which idle copies are searched for."""


def find_idle_copies(view: InspectionInput, live: LiveObjects) -> list[RetainedObject]:
    """Find models that were not called in the last step, and optimizers that did not step in it.

    Only classes with at least three instances count. An optimizer that has never stepped is not idle.
    """
    last_calls = (call for stats in view.calls.stats.values() for call in stats.module_ids.items())
    called = {number for number, step in last_calls if step >= view.last_step}
    models: dict[type, list[nn.Module]] = {}
    for root in find_outermost_modules(live.modules):
        models.setdefault(type(root), []).append(root)
    optimizers: dict[type, list[Optimizer]] = {}
    for optimizer in live.optimizers:
        optimizers.setdefault(type(optimizer), []).append(optimizer)
    found: list[tuple[str, Any, dict[int, int]]] = []
    for same in models.values():
        if len(same) >= LEAST_COPIES:
            idle = (root for root in same if called.isdisjoint(map(id, root.modules())))
            found += [("models", root, map_standing_storages(root)) for root in idle]
    for others in optimizers.values():
        if len(others) >= LEAST_COPIES:
            updates = view.calls.last_updates
            idle_ones = [other for other in others if updates.get(id(other), view.last_step) < view.last_step]
            found += [("optimizers", optimizer, map_standing_storages(optimizer)) for optimizer in idle_ones]
    models.clear()
    optimizers.clear()
    items = [
        RetainedObject(
            held_bytes=sum(held.values()),
            storages=held,
            subject=kind,
            made_in_step=view.last_step,
            idle_ids=frozenset(map(id, copy.modules())) if kind == "models" else frozenset(),
        )
        for kind, copy, held in found
    ]
    if sum(item.held_bytes for item in items) >= view.least_bytes:
        search = make_holder_search(view, live)
        search.ignored |= {id(found), *map(id, found)}
        assign_holders(
            {n: [item] for n, item in enumerate(items)}, search, [(n, obj) for n, (_, obj, _) in enumerate(found)]
        )
    return items


def find_orphaned_parameters(view: InspectionInput, live: LiveObjects) -> list[RetainedObject]:
    """Find the parameters that only optimizers still refer to. Their holder is the optimizer's `param_groups`."""
    found = list(find_orphans(live))
    items = [
        RetainedObject(
            held_bytes=sum(orphans.storages.values()),
            storages=orphans.storages,
            subject="parameters",
            made_in_step=view.last_step,
        )
        for orphans in found
    ]
    if sum(item.held_bytes for item in items) >= view.least_bytes:
        search = make_holder_search(view, live)
        search.ignored |= {id(found), *map(id, found)}
        assign_holders(
            {n: [item] for n, item in enumerate(items)}, search, [(n, o.optimizer) for n, o in enumerate(found)]
        )
        for item, orphans in zip(items, found, strict=True):
            if item.holder is not None:
                item.holders = [_make_groups_holder(item.holder, orphans)]
    return items


def _make_groups_holder(holder: Holder, orphans: Orphans) -> Holder:
    """Make the holder for an optimizer's `param_groups` from `holder`, the variable that holds the optimizer."""
    entries = f"[{orphans.n_groups} entries]"
    return replace(
        holder,
        text=f"{holder.text} .param_groups{entries}",
        key=f"{holder.key} groups",
        containers={id(orphans.optimizer.param_groups): orphans.n_groups},
    )
