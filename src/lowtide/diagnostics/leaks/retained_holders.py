"""Search for the holders of retained objects: the program's objects that refer to them."""

from __future__ import annotations

import gc
from itertools import islice
from typing import TYPE_CHECKING, Any

from lowtide.diagnostics.leaks.live_tensors import LiveObjects, find_arrays_over, find_live_arrays, find_live_tasks
from lowtide.diagnostics.leaks.module_paths import module_names
from lowtide.diagnostics.leaks.reference_cycles import find_cycle_holder
from lowtide.diagnostics.leaks.referrers import MOST_TENSORS, HolderSearch
from lowtide.diagnostics.leaks.registered_hooks import RegisteredHooks

if TYPE_CHECKING:
    from lowtide.diagnostics.leaks.inspection import InspectionInput
    from lowtide.diagnostics.leaks.retained_object import RetainedObject


def find_holders(retained: list[tuple[RetainedObject, list[int]]], view: InspectionInput, live: LiveObjects) -> None:
    """Find the holders of retained objects, and set them. Each object comes with its tensors' indices in `live`."""
    search = make_holder_search(view, live)
    search.has_unnamed_lists = True
    wanted: dict[int, list[RetainedObject]] = {}
    for item, indices in retained:
        for index in indices:
            wanted.setdefault(index, []).append(item)
    assign_holders(wanted, search, [(index, live.tensors[index]) for index in wanted])
    without = {index: items for index, items in wanted.items() if not items[0].holders}
    if sum(items[0].held_bytes for items in without.values()) >= view.least_bytes:
        arrays, search.unseen = find_live_arrays()
        search.unseen += find_live_tasks()
        search.ignored |= {id(arrays), id(search.unseen)}
        over_memory = find_arrays_over({id(live.tensors[index]): index for index in without}, arrays)
        tensors = [(index, live.tensors[index]) for index in without] if search.unseen else []
        assign_holders(without, search, over_memory + tensors)
    if not gc.isenabled():
        without = {index: items for index, items in without.items() if not items[0].holders}
        looked_for = without if sum(items[0].held_bytes for items in without.values()) >= view.least_bytes else {}
        for index, items in islice(looked_for.items(), MOST_TENSORS):
            if (cycle := find_cycle_holder(live.tensors[index], search.ignored)) is not None:
                items[0].holders.append(cycle)


def make_holder_search(view: InspectionInput, live: LiveObjects) -> HolderSearch:
    """Make a search for holders that ignores the lists of the snapshot `live`."""
    names = module_names(view.model, live.modules)
    return HolderSearch(
        names,
        RegisteredHooks(live.modules),
        {id(live.tensors), id(live.modules), id(live.optimizers), id(live.datasets)},
    )


def assign_holders(
    wanted: dict[int, list[RetainedObject]], search: HolderSearch, targets: list[tuple[int, Any]]
) -> None:
    """Find the holders of `targets`, pairs of a tensor's index and an object, and add them to the retained objects.

    `wanted` maps each index to the retained objects that get the holders.
    """
    search.ignored.add(id(targets))
    search.ignored |= {id(pair) for pair in targets}
    holders_of = search.holders(targets)
    for index, items in wanted.items():
        for item in items:
            have = item.holders
            have += [holder for holder in holders_of.get(index, ()) if all(other.key != holder.key for other in have)]
