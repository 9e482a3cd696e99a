"""One inspection: the objects that a step left alive at its boundary, and their properties."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from lowtide._torch.nodes import sequence_number
from lowtide._torch.tensors import held_by_python, storage_id
from lowtide.diagnostics.leaks.call_log import Backward, Call, CallLog, StepNumbers, roots_among
from lowtide.diagnostics.leaks.holders import RANK, Holder
from lowtide.diagnostics.leaks.live_tensors import (
    KnownStorages,
    LiveObjects,
    arrays_over,
    live_arrays,
    live_tasks,
    standing_storages,
    storage_bytes,
)
from lowtide.diagnostics.leaks.optimizer_orphans import Orphans, orphans_of_optimizers
from lowtide.diagnostics.leaks.reference_cycles import cycle_holder
from lowtide.diagnostics.leaks.referrers import MOST_TENSORS, HolderSearch
from lowtide.diagnostics.leaks.registered_hooks import RegisteredHooks
from lowtide.diagnostics.leaks.tensor_graphs import Graph, computed_by, graphs_of

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


LEAST_COPIES = 3
"""Smallest number of models, or of optimizers, of one class among which idle ones are looked for."""

LEAST_NODE_BYTES = 16 * 1024
"""Empty graphs with less host memory than this are left out."""


@dataclass(slots=True, kw_only=True)
class RetainedObject:
    """Tensors with one holder, or with one graph, that a step left in memory. Holds no reference to user objects."""

    held_bytes: int
    """Bytes that are freed when the holder drops its reference: the tensors' own memory, and memory that only their
    graph keeps.
    """
    unfreed_bytes: int = 0
    """The part of `held_bytes` that autograd saved for a backward pass that has not reached it."""
    context_bytes: int = 0
    """The part of `held_bytes` in tensors that custom Functions set as attributes of their ctx."""
    holders: list[Holder] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    """Calls that made the graph, or returned the output; oldest first."""
    steps: tuple[int, ...] = ()
    """Steps in which the graph's nodes were made."""
    backwards: list[Backward] = field(default_factory=list)
    has_graph: bool = False
    """True if the tensors have a graph that backward could still go through."""
    is_scalar: bool = False
    is_input: bool = False
    """True if one of the object's tensors is an input of the current call."""
    is_fed_back: bool = False
    """True if that input was computed by an earlier call of the module that is being called."""
    is_output: bool = False
    is_view: bool = False
    """True if the tensors are views of less than half of the memory that they keep alive."""
    shown_bytes: int = 0
    born: int = 0
    """Step in which the object was made, if known."""
    storages: dict[int, int] = field(default_factory=dict)
    """Storage number -> bytes."""
    n_tensors: int = 1
    subject: str = "tensors"
    """Kind of the object: "tensors"; "nodes" of a graph whose saved tensors backward has freed; "evaluation" for
    tensors that are found during an evaluation, between calls without gradients; "carried" for outputs without a
    graph that are given to the next call; "gradients" of tensors that are no parameters; "models" and "optimizers" for
    copies that are not in use; "parameters" that only an optimizer still refers to.
    """
    idle_ids: frozenset[int] = frozenset()
    """Ids of the modules of a copy that is not in use."""
    is_older: bool = False
    """True if the object's graph began before the watch did."""
    is_from_before: bool = False
    """True if all of the object's graph was made before the watch began."""
    has_model: bool = True
    """False in a loop that calls no model: steps are told by backward passes, and no call made the graph."""
    is_of_gradients: bool = False
    """True if the `.grad` of a parameter has this graph."""
    buffer: str | None = None
    is_within_data: bool = False
    """True for data in a dict or cache that has no more entries than a data set has samples."""

    @property
    def is_state(self) -> bool:
        """True if a module or a loop carries these tensors from step to step, without a graph."""
        return not self.has_graph and self.holder is not None and self.holder.is_state

    @property
    def goes_through_calls(self) -> bool:
        """True if the tensors' graph goes through several calls from one line."""
        return len(self.calls) > len({id(call.stats) for call in self.calls})

    @property
    def holder(self) -> Holder | None:
        """The holder to report. Lists, and objects with a list, take precedence over a variable of the last entry."""
        return min(self.holders, key=lambda h: (RANK.index(h.kind), not h.gathers, not h.containers), default=None)

    @property
    def is_used_again(self) -> bool:
        """True if backward passes of later forwards go through the graphs of earlier calls of the same line."""
        return any(call.stats.is_used_again for call in self.calls)

    def is_held_as(self, kind: str) -> bool:
        """Return True if the holder to report is of the kind `kind`."""
        return self.holder is not None and self.holder.kind == kind


@dataclass(slots=True, kw_only=True)
class InspectionInput:
    """Input of an inspection: the model, which names its parts, and the records of calls, steps and storages."""

    model: nn.Module | None
    calls: CallLog
    steps: StepNumbers
    known: KnownStorages
    inputs: frozenset[int]
    """Storages of the current call's inputs."""
    new_from: int
    """Number of the first graph node of the step that begins now."""
    least_bytes: int
    is_fed_back: bool = False
    """True if an input of the current call was computed by an earlier call of the module."""
    in_evaluation: bool = False
    """True between calls without gradients."""
    has_model: bool = True
    """True once a model was called with gradients."""
    watched_from: int = 0
    """Number of the first graph node that was made under the watch."""
    last_step: int = 0
    """Number of the step that has just ended, or is about to."""


def inspect(view: InspectionInput, live: LiveObjects) -> list[RetainedObject]:
    """Return all objects that the step left alive, largest first. Small ones count too: one holder may have many."""
    excused = live.standing | {0}
    tensors = live.tensors
    held = [index for index in range(len(tensors)) if held_by_python(tensors, index, 1)]  # 1: the list itself
    gradients = [(i, t.grad) for i, t in enumerate(tensors) if t.is_leaf and t.grad is not None]
    graphs = graphs_of(tensors, held, gradients, new_from=view.new_from)
    of_python = set(held)
    gradients_of_leaves = [(i, gradient) for i, gradient in gradients if i in of_python and gradient.grad_fn is None]
    gradients.clear()
    in_graphs = {index for graph in graphs if graph.unfreed for index in graph.tensors}
    plain = {
        number for index in held if index not in in_graphs and (number := storage_id(tensors[index])) not in excused
    }
    of_user = {n for n in plain | set(view.inputs) if (since := view.known.since(n)) is not None and since == 0}
    retained = []
    for graph in graphs:
        if graph.is_empty and graph.tensors and graph.node_bytes >= LEAST_NODE_BYTES:
            retained.append((_retained_nodes(graph, view), graph.tensors[:1]))  # the newest leads to all others
        if not graph.unfreed:
            continue
        item = _retained_graph(graph, view, live, excused | of_user | view.inputs)
        holding = [index for index in graph.tensors if _is_relevant(index, graph, item, live)]
        given = [index for index in holding if storage_id(tensors[index]) in view.inputs]
        retained.append((item, given + [index for index in holding if index not in given]))
    by_storage: dict[int, list[int]] = {}
    for index in held:
        number = storage_id(tensors[index])
        if index not in in_graphs and number in plain and number not in of_user and number not in view.inputs:
            by_storage.setdefault(number, []).append(index)
    for index, gradient in gradients_of_leaves:
        number = storage_id(gradient)
        if number not in excused:
            item = RetainedObject(
                held_bytes=storage_bytes(gradient),
                storages={number: storage_bytes(gradient)},
                subject="gradients",
                born=view.last_step,
            )
            retained.append((item, [index]))
    outputs = view.calls.of_output(set(by_storage) | view.inputs)
    for number, indices in by_storage.items():
        retained.append((_retained_storage(number, indices, outputs.get(number), view, live), indices))
    retained += _carried(plain & view.inputs & outputs.keys(), held, outputs, view, live)
    retained.sort(key=lambda entry: -entry[0].held_bytes)
    if sum(item.held_bytes for item, _ in retained) >= view.least_bytes:
        _find_holders(retained, view, live)
    with_graph = {index for graph in graphs if graph.unfreed for index in graph.gradient_of}
    for item, _ in retained:
        if item.is_of_gradients:
            text = f"gradient graph of {_parameters(with_graph, view, live)} (create_graph)"
            item.holders = [Holder(kind="gradient", text=text, key="gradients")]
    _note_data(retained, view, live)
    buffers = list(_new_buffers(view, live))
    view.known.note(tensors, view.last_step)
    copies = [] if view.in_evaluation else _idle_copies(view, live)
    orphans = [] if view.in_evaluation else _orphans(view, live)
    return [item for item, _ in retained] + copies + orphans + buffers


def _carried(
    numbers: set[int], held: list[int], outputs: dict[int, Call], view: InspectionInput, live: LiveObjects
) -> Iterator[tuple[RetainedObject, list[int]]]:
    """Yield the storages `numbers`, which earlier calls have returned and the current one is given, without a graph."""
    by_storage: dict[int, list[int]] = {}
    for index in held if numbers else ():
        if (number := storage_id(live.tensors[index])) in numbers:
            by_storage.setdefault(number, []).append(index)
    for number, indices in by_storage.items():
        item = _retained_storage(number, indices, outputs[number], view, live)
        yield replace(item, subject="carried", is_input=True, is_output=False), indices


def _new_buffers(view: InspectionInput, live: LiveObjects) -> Iterator[RetainedObject]:
    """Yield the buffers that modules have replaced since the last inspection, such as caches that grow."""
    found = [
        (module, name, buffer)
        for module in live.modules
        for name, buffer in module.__dict__.get("_buffers", {}).items()
        if buffer is not None and view.known.since(storage_id(buffer)) is None
    ]
    names = module_names(view.model, live.modules) if found else {}
    for module, name, buffer in found:
        text = f"{names[id(module)]}.{name}"
        yield RetainedObject(
            held_bytes=storage_bytes(buffer),
            storages={storage_id(buffer): storage_bytes(buffer)},
            subject="carried",
            is_input=True,
            born=view.last_step,
            holders=[Holder(kind="module", text=text, key=f"buffer {text}", name=name, is_state=True)],
        )


def _note_data(retained: list[tuple[RetainedObject, list[int]]], view: InspectionInput, live: LiveObjects) -> None:
    """Note which objects may be samples that a data set remembers."""
    cached = [item for item, _ in retained if not item.calls and item.holder is not None and item.holder.is_keyed]
    if cached:
        view.calls.n_samples = max(view.calls.n_samples, live.n_samples)
    for item in cached:
        assert item.holder is not None
        item.is_within_data = max(item.holder.containers.values(), default=0) <= view.calls.n_samples


def _idle_copies(view: InspectionInput, live: LiveObjects) -> list[RetainedObject]:
    """Return models of one class that are not called any more, and optimizers of one class without updates lately."""
    last_calls = (call for stats in view.calls.stats.values() for call in stats.module_ids.items())
    called = {number for number, step in last_calls if step >= view.last_step}
    models: dict[type, list[nn.Module]] = {}
    for root in roots_of(live.modules):
        models.setdefault(type(root), []).append(root)
    optimizers: dict[type, list[Optimizer]] = {}
    for optimizer in live.optimizers:
        optimizers.setdefault(type(optimizer), []).append(optimizer)
    found: list[tuple[str, Any, dict[int, int]]] = []
    for same in models.values():
        if len(same) >= LEAST_COPIES:
            idle = (root for root in same if called.isdisjoint(map(id, root.modules())))
            found += [("models", root, standing_storages(root)) for root in idle]
    for others in optimizers.values():
        if len(others) >= LEAST_COPIES:
            updates = view.calls.last_updates
            idle_ones = [other for other in others if updates.get(id(other), view.last_step) < view.last_step]
            found += [("optimizers", optimizer, standing_storages(optimizer)) for optimizer in idle_ones]
    models.clear()
    optimizers.clear()
    items = [
        RetainedObject(
            held_bytes=sum(held.values()),
            storages=held,
            subject=kind,
            born=view.last_step,
            idle_ids=frozenset(map(id, copy.modules())) if kind == "models" else frozenset(),
        )
        for kind, copy, held in found
    ]
    if sum(item.held_bytes for item in items) >= view.least_bytes:
        search = _holder_search(view, live)
        search.ignored |= {id(found), *map(id, found)}
        _assign_holders(
            {n: [item] for n, item in enumerate(items)}, search, [(n, obj) for n, (_, obj, _) in enumerate(found)]
        )
    return items


def _orphans(view: InspectionInput, live: LiveObjects) -> list[RetainedObject]:
    """Return the parameters that only optimizers still refer to; their holders are the groups of the optimizers."""
    found = list(orphans_of_optimizers(live))
    items = [
        RetainedObject(
            held_bytes=sum(orphans.storages.values()),
            storages=orphans.storages,
            subject="parameters",
            born=view.last_step,
        )
        for orphans in found
    ]
    if sum(item.held_bytes for item in items) >= view.least_bytes:
        search = _holder_search(view, live)
        search.ignored |= {id(found), *map(id, found)}
        _assign_holders(
            {n: [item] for n, item in enumerate(items)}, search, [(n, o.optimizer) for n, o in enumerate(found)]
        )
        for item, orphans in zip(items, found, strict=True):
            if item.holder is not None:
                item.holders = [_groups_of(item.holder, orphans)]
    return items


def _groups_of(holder: Holder, orphans: Orphans) -> Holder:
    """Return the holder for the groups of the optimizer that `holder` holds."""
    entries = f"[{orphans.n_groups} entries]"
    return replace(
        holder,
        text=f"{holder.text} .param_groups{entries}",
        key=f"{holder.key} groups",
        containers={id(orphans.optimizer.param_groups): orphans.n_groups},
    )


def _is_relevant(index: int, graph: Graph, item: RetainedObject, live: LiveObjects) -> bool:
    """Return True if releasing the tensor frees part of the graph, or enough memory of its own."""
    own_bytes = item.storages.get(storage_id(live.tensors[index]), 0)
    return index in graph.keepers or 20 * own_bytes >= item.held_bytes


def _retained_graph(graph: Graph, view: InspectionInput, live: LiveObjects, excused: set[int]) -> RetainedObject:
    tensors = [live.tensors[index] for index in graph.tensors]
    own = {storage_id(t): storage_bytes(t) for t in tensors}
    unfreed = {number: n for number, n in graph.unfreed.items() if number not in excused}
    context = {number: n for number, n in graph.context.items() if number not in excused}
    alive = {**{number: n for number, n in own.items() if number not in excused}, **unfreed, **context}
    numbers = graph.numbers
    calls = [call for call in view.calls.between(min(numbers), max(numbers)) if has_made(call, numbers)]
    backwards = {id(b): b for b in [*(b for c in calls for b in c.backwards), *roots_among(graph.nodes)]}
    return RetainedObject(
        held_bytes=sum(alive.values()),
        unfreed_bytes=sum(unfreed.values()),
        context_bytes=sum(n for number, n in context.items() if number not in unfreed),
        calls=calls,
        steps=tuple(sorted({view.steps.of(number) for number in numbers})),
        backwards=list(backwards.values()),
        has_graph=True,
        is_scalar=bool(graph.tensors) and live.tensors[graph.tensors[0]].numel() == 1,
        is_input=(is_input := any(storage_id(t) in view.inputs for t in tensors)),
        is_fed_back=is_input and view.is_fed_back,
        born=min(view.steps.of(number) for number in numbers),
        storages=alive,
        n_tensors=len(tensors),
        is_of_gradients=bool(graph.gradient_of),
        has_model=view.has_model,
        buffer=next((live.buffers[id(t)] for t in tensors if id(t) in live.buffers), None),
        is_older=min(numbers) < view.watched_from,
        is_from_before=max(numbers) < view.watched_from,
    )


def _retained_nodes(graph: Graph, view: InspectionInput) -> RetainedObject:
    numbers = graph.numbers
    return RetainedObject(
        held_bytes=graph.node_bytes,
        calls=[call for call in view.calls.between(min(numbers), max(numbers)) if has_made(call, numbers)],
        steps=tuple(sorted({view.steps.of(number) for number in numbers})),
        born=min(view.steps.of(number) for number in numbers),
        storages={-min(numbers): graph.node_bytes},  # no storage has a negative number
        n_tensors=len(graph.tensors),
        subject="nodes",
        is_from_before=max(numbers) < view.watched_from,
    )


def _retained_storage(
    number: int, indices: list[int], output_of: Call | None, view: InspectionInput, live: LiveObjects
) -> RetainedObject:
    tensors = [live.tensors[index] for index in indices]
    n_bytes = storage_bytes(tensors[0])
    shown_bytes = sum(t.numel() * t.element_size() for t in tensors)
    call = output_of
    numbers = [sequence_number(node) for t in tensors if (node := computed_by(t)) is not None]
    if call is None and numbers:  # the nodes of a freed graph still tell which call made it
        call = next(iter(view.calls.between(min(numbers), max(numbers))), None)
    since = view.known.since(number)
    return RetainedObject(
        held_bytes=n_bytes,
        shown_bytes=shown_bytes,
        is_view=2 * shown_bytes < n_bytes,
        calls=[call] if call else [],
        subject="evaluation" if view.in_evaluation else "tensors",
        is_output=output_of is not None,
        born=view.steps.of(min(numbers)) if numbers else call.step if call else since or view.last_step,
        storages={number: n_bytes},
        n_tensors=len(tensors),
    )


def _find_holders(retained: list[tuple[RetainedObject, list[int]]], view: InspectionInput, live: LiveObjects) -> None:
    search = _holder_search(view, live)
    search.has_unnamed_lists = True
    wanted: dict[int, list[RetainedObject]] = {}
    for item, indices in retained:
        for index in indices:
            wanted.setdefault(index, []).append(item)
    _assign_holders(wanted, search, [(index, live.tensors[index]) for index in wanted])
    without = {index: items for index, items in wanted.items() if not items[0].holders}
    if sum(items[0].held_bytes for items in without.values()) >= view.least_bytes:
        arrays, search.unseen = live_arrays()
        search.unseen += live_tasks()
        search.ignored |= {id(arrays), id(search.unseen)}
        over_memory = arrays_over({id(live.tensors[index]): index for index in without}, arrays)
        tensors = [(index, live.tensors[index]) for index in without] if search.unseen else []
        _assign_holders(without, search, over_memory + tensors)
    if not gc.isenabled():
        without = {index: items for index, items in without.items() if not items[0].holders}
        looked_for = without if sum(items[0].held_bytes for items in without.values()) >= view.least_bytes else {}
        for index, items in islice(looked_for.items(), MOST_TENSORS):
            if (cycle := cycle_holder(live.tensors[index], search.ignored)) is not None:
                items[0].holders.append(cycle)


def _holder_search(view: InspectionInput, live: LiveObjects) -> HolderSearch:
    names = module_names(view.model, live.modules)
    return HolderSearch(
        names,
        RegisteredHooks(live.modules),
        {id(live.tensors), id(live.modules), id(live.optimizers), id(live.datasets)},
    )


def _assign_holders(
    wanted: dict[int, list[RetainedObject]], search: HolderSearch, targets: list[tuple[int, Any]]
) -> None:
    """Set the holders of the retained objects. Each of `targets` is an object, paired with the index of a tensor."""
    search.ignored.add(id(targets))
    search.ignored |= {id(pair) for pair in targets}
    holders_of = search.holders(targets)
    for index, items in wanted.items():
        for item in items:
            have = item.holders
            have += [holder for holder in holders_of.get(index, ()) if all(other.key != holder.key for other in have)]


def module_names(model: nn.Module | None, modules: Iterable[nn.Module]) -> dict[int, str]:
    """Map ids of modules to names: `model.encoder` inside the watched model, the class name inside others."""
    names: dict[int, str] = {}
    roots = [root for root in roots_of(modules) if root is not model]
    for root, name in [*((root, type(root).__name__) for root in roots), *([(model, "model")] if model else [])]:
        for path, module in root.named_modules():
            names[id(module)] = f"{name}.{path}" if path else name
    return names


def roots_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the outermost of some modules: those that no other one contains."""
    inside = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inside]


def _parameters(indices: set[int], view: InspectionInput, live: LiveObjects) -> str:
    """Return `parameter 'weight' and 3 more`, naming the first in the order of the model."""
    wanted = {id(live.tensors[index]) for index in indices}
    for module in ([view.model] if view.model is not None else []) + roots_of(live.modules):
        for name, parameter in module.named_parameters():
            if id(parameter) in wanted:
                return f"parameter '{name}'" + (f" and {len(wanted) - 1} more" if len(wanted) > 1 else "")
    return f"{len(wanted)} leaves that are in no module"


def has_made(call: Call, numbers: list[int]) -> bool:
    """Return True if the call created a node with one of these sequence numbers."""
    return any(call.first <= number < call.stop for number in numbers)
